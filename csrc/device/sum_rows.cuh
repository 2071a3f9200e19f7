// Sums of rows, for both halves of combine: the walk says which rows and where the sum goes.
//
//   row_0, row_1, ... --TMA loads--> slots --add in fp32, in this order--> last slot --TMA store-->
//   sum
//
// A slot holds a slice of one row. The adders of a ring keep the slice's sum in registers and put
// it where its last term was. A sum starts with its first term (-0 + x is x, 0 + x is not), rounds
// each product before adding it, and is rounded once at the end, as the torch backend does.
#pragma once

#include "device/ring.cuh"
#include "device/vector.cuh"

namespace hybrid_ep::device {

constexpr int kAdderWarps = 8;  // of a ring
constexpr int kAdders = kAdderWarps * kWarp;
constexpr int kVectors = layout::kMostSumBytes / (kAdders * 16);  // of 16 bytes, an adder's share

// One sum, in lane i its i-th row (i < num_rows); no rows make a sum of zero.
struct SumJob {
    int num_rows;
    const char* row;
    float weight;
    char* sum;
};

// Behind a slot: a slice of a row and its part in a sum.
struct TermHeader {
    char* sum;  // where the finished slice goes
    int bytes;  // kEnd: there is no more
    float weight;
    bool is_first, is_last, is_zero;  // zero: a sum without terms, nothing was loaded

    static constexpr int kEnd = -1;
};

// One warp: loads the terms of sum after sum. `Walk::next(SumJob&)` is called by the whole warp.
template <typename Walk>
__device__ __forceinline__ void load_terms(Walk& walk, const Slots& slots, SlotHandover& handover,
                                           const layout::SliceLayout& slices, int row_bytes) {
    Turn turn;
    SumJob job;
    while (walk.next(job)) {
        const int num_terms = max(job.num_rows, 1);
        for (int slice = 0; slice < slices.num_slices; ++slice) {
            const int offset = slice * slices.slice_bytes;
            const int bytes = min(slices.slice_bytes, row_bytes - offset);
            for (int i = 0; i < num_terms; ++i) {
                handover.await_free(turn);
                if (lane_id() == i) {
                    slots.header<TermHeader>(turn.at) = {job.sum + offset,   bytes,
                                                         job.weight,         i == 0,
                                                         i + 1 == num_terms, job.num_rows == 0};
                    handover.filled_by(turn, job.num_rows > 0 ? bytes : 0);
                    if (job.num_rows > 0) {
                        ptx::bulk_load(slots.bytes(turn.at), job.row + offset, bytes,
                                       handover.barrier(turn));
                    }
                }
                turn.advance(slots.size());
            }
        }
    }
    handover.await_free(turn);
    if (lane_id() == 0) {
        slots.header<TermHeader>(turn.at).bytes = TermHeader::kEnd;
        handover.filled(turn);
    }
}

// The adders of a ring, kAdderWarps of them; `barrier` is a named barrier of their own.
template <typename T, bool kWeighted>
class Adder {
  public:
    __device__ Adder(const Slots& slots, SlotHandover& handover, int adder, int barrier)
        : slots_(slots), handover_(handover), adder_(adder), barrier_(barrier) {}

    __device__ void run() {
        float sum[kVectors][V::kSize];
        while (true) {
            handover_.await_filled(turn_);
            const TermHeader header = slots_.header<TermHeader>(turn_.at);
            if (header.bytes == TermHeader::kEnd) break;
            if (header.is_first) begin(sum, header.is_zero ? 0.f : -0.f);
            if (!header.is_zero && at(0) < header.bytes) add(sum, header);
            if (header.is_last) {
                store(sum, header);
            } else {
                free_slot(turn_.at);
            }
            turn_.advance(slots_.size());
        }
        ptx::bulk_wait_written<0>();
    }

  private:
    using V = Vector<T>;

    __device__ __forceinline__ void begin(float (&sum)[kVectors][V::kSize], float zero) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int k = 0; k < V::kSize; ++k) sum[v][k] = zero;
        }
    }

    // For a vector beyond the slice's end the first is read again, which costs less than not to.
    __device__ __forceinline__ void add(float (&sum)[kVectors][V::kSize],
                                        const TermHeader& header) const {
        const char* slot = slots_.bytes(turn_.at);
        uint4 packed[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            packed[v] = *reinterpret_cast<const uint4*>(slot + at(at(v) < header.bytes ? v : 0));
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            float term[V::kSize];
            V::unpack(packed[v], term);
#pragma unroll
            for (int k = 0; k < V::kSize; ++k) {
                if constexpr (kWeighted) term[k] = __fmul_rn(header.weight, term[k]);
                sum[v][k] = __fadd_rn(sum[v][k], term[k]);
            }
        }
    }

    // All adders: each overwrites what it alone has read, so only the store waits for the others.
    __device__ __forceinline__ void store(const float (&sum)[kVectors][V::kSize],
                                          const TermHeader& header) {
        char* slot = slots_.bytes(turn_.at);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (at(v) < header.bytes) {
                *reinterpret_cast<uint4*>(slot + at(v)) = V::pack(sum[v]);
            }
        }
        ptx::fence_proxy_async_smem();
        ptx::barrier_sync(barrier_, kAdders);
        if (adder_ >= kWarp) return free_slot(turn_.at);
        // the first warp stores, and frees the slot when the store has read it
        if (lane_id() == 0) ptx::bulk_store(header.sum, slot, header.bytes);
        ptx::bulk_commit();
        if (stored_ >= 0) {
            ptx::bulk_wait_read<1>();
            free_slot(stored_);
        }
        stored_ = turn_.at;
    }

    __device__ __forceinline__ void free_slot(int slot) {
        __syncwarp();
        if (lane_id() == 0) handover_.freed(slot);
    }

    __device__ __forceinline__ int at(int v) const { return (v * kAdders + adder_) * 16; }

    const Slots& slots_;
    SlotHandover& handover_;
    int adder_, barrier_;
    Turn turn_;
    int stored_ = -1;  // the first warp: a slot that a store may still read
};

}  // namespace hybrid_ep::device
