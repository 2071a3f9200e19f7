// Sums of rows, for both halves of combine: the walk says which rows and where the sum goes.
//
//   row_0, row_1, ... --TMA loads--> slots --add in fp32, in this order--> registers
//   registers --round--> last slot --TMA store--> sum
//
// A slot holds a slice of one row. The adders of a ring keep the slice's sum in registers and put
// it where its last term was. A sum starts with its first term (-0 + x is x, 0 + x is not), rounds
// each product before adding it, and is rounded once at the end, as the torch backend does.
#pragma once

#include "device/ring.cuh"
#include "device/vector.cuh"

namespace hybrid_ep::device {

constexpr int kAdderWarps = 7;  // of a ring
constexpr int kAdders = kAdderWarps * kWarp;
constexpr int kVectors = layout::kMostSumBytes / (kAdders * 16);  // of 16 bytes, an adder's share

// One sum, in lane i its i-th row (i < num_rows); no rows make a sum of zero.
struct SumJob {
    int num_rows;
    const char* row;
    float weight;
    char* sum;
};

// Behind a slot: a slice of a row. Only the first of a sum says what becomes of it.
struct TermHeader {
    float weight;
    int num_terms;  // kEnd: there is no more; 0: a sum without terms, nothing was loaded
    int bytes;
    char* sum;  // where the finished slice goes

    static constexpr int kEnd = -1;
};
static_assert(sizeof(TermHeader) == layout::kSumHeaderBytes);

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
                    slots.header<TermHeader>(turn.at) = {job.weight, job.num_rows, bytes,
                                                         job.sum + offset};
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
        slots.header<TermHeader>(turn.at).num_terms = TermHeader::kEnd;
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
        while (true) {
            handover_.await_filled(turn_);
            const TermHeader header = slots_.header<TermHeader>(turn_.at);
            if (header.num_terms == TermHeader::kEnd) break;
            bytes_ = header.bytes;
            begin(header.num_terms == 0 ? 0.f : -0.f);
            for (int left = header.num_terms - 1; left > 0; --left) {
                add();
                free_slot(turn_.at);
                free_stored<0>();
                turn_.advance(slots_.size());
                handover_.await_filled(turn_);
            }
            if (header.num_terms > 0) add();
            store(header.sum);
            turn_.advance(slots_.size());
        }
        ptx::bulk_wait_written<0>();
    }

  private:
    using V = Vector<T>;

    __device__ __forceinline__ void begin(float zero) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int k = 0; k < V::kSize; ++k) sum_[v][k] = zero;
        }
    }

    // An adder beyond the slice's end adds what was there before to sums that nobody looks at: that
    // is cheaper than a branch that divides a warp.
    __device__ __forceinline__ void add() {
        const char* mine = slots_.bytes(turn_.at) + adder_ * 16;
        const float weight = kWeighted ? slots_.header<TermHeader>(turn_.at).weight : 1.f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (at(v) < bytes_) {
                term_[v] = *reinterpret_cast<const uint4*>(mine + v * (kAdders * 16));
            }
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (v * kAdders * 16 >= bytes_) break;
            float term[V::kSize];
            V::unpack(term_[v], term);
#pragma unroll
            for (int k = 0; k < V::kSize; ++k) {
                if constexpr (kWeighted) term[k] = __fmul_rn(weight, term[k]);
                sum_[v][k] = __fadd_rn(sum_[v][k], term[k]);
            }
        }
    }

    // All adders: each overwrites what it alone has read, so only the store waits for the others.
    __device__ __forceinline__ void store(char* to) {
        char* slot = slots_.bytes(turn_.at);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (at(v) < bytes_) *reinterpret_cast<uint4*>(slot + at(v)) = V::pack(sum_[v]);
        }
        ptx::fence_proxy_async_smem();
        ptx::barrier_sync(barrier_, kAdders);
        if (adder_ >= kWarp) return free_slot(turn_.at);
        // the first warp stores, and frees the slot when the store has read it
        if (lane_id() == 0) ptx::bulk_store(to, slot, bytes_);
        ptx::bulk_commit();
        free_stored<1>();
        stored_ = turn_.at;
    }

    // The slot of the sum before; the loader needs it when a sum has more terms than the ring
    // slots.
    template <int kNewer>
    __device__ __forceinline__ void free_stored() {
        if (stored_ < 0) return;
        ptx::bulk_wait_read<kNewer>();
        free_slot(stored_);
        stored_ = -1;
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
    int bytes_ = 0;  // of the slice
    uint4 term_[kVectors]{};
    float sum_[kVectors][V::kSize];
    int stored_ = -1;  // the first warp: a slot that a store may still read
};

}  // namespace hybrid_ep::device
