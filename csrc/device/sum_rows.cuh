// Sums of rows, for both halves of combine: the walk says which rows and where the sum goes.
//
//   row_0, row_1, ... --TMA loads--> slots --add in fp32, in this order--> last slot --TMA store-->
//   sum
//
// A slot holds a slice of one row. The adders of a ring keep the slice's sum in registers and put
// it where its last term was. A sum starts with its first term (-0 + x is x, 0 + x is not), rounds
// each product before adding it, and is rounded once at the end, as the torch backend does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/ring.cuh"

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

// 16 bytes of a row as floats, and back.
template <typename T>
struct Vector;

template <>
struct Vector<float> {
    static constexpr int kSize = 4;
    static __device__ __forceinline__ void unpack(const uint4& v, float* f) {
        f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y);
        f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return {__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                __float_as_uint(f[3])};
    }
};

template <>
struct Vector<__nv_bfloat16> {
    static constexpr int kSize = 8;
    static __device__ __forceinline__ void unpack(const uint4& v, float* f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4; ++i) {
            f[2 * i] = __uint_as_float(w[i] << 16);
            f[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
        }
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high) {
        __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&v);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return {pair(f[0], f[1]), pair(f[2], f[3]), pair(f[4], f[5]), pair(f[6], f[7])};
    }
};

template <>
struct Vector<__half> {
    static constexpr int kSize = 8;
    static __device__ __forceinline__ void unpack(const uint4& v, float* f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4; ++i) {
            float2 two = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
            f[2 * i] = two.x, f[2 * i + 1] = two.y;
        }
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high) {
        __half2 v = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&v);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return {pair(f[0], f[1]), pair(f[2], f[3]), pair(f[4], f[5]), pair(f[6], f[7])};
    }
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
                free_stored<0>();
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
    int stored_ = -1;  // the first warp: a slot that a store may still read
};

}  // namespace hybrid_ep::device
