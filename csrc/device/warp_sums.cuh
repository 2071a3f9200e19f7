// Sums of rows, for both halves of combine: the walk says which rows and where the sum goes.
//
//   row_0, row_1, ... --TMA loads--> stage --add in fp32, in this order--> stage --TMA store--> sum
//
// A stage holds the same slice of all rows of one sum; the sum replaces the first row's slice. A
// sum starts with its first term (not with zero), rounds each product before adding it, and is
// rounded once at the end, as the torch backend does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/warp_ring.cuh"

namespace hybrid_ep::device {

// One sum, in lane i its i-th row (i < num_rows); no rows make a sum of zero.
struct WarpSumJob {
    int num_rows;
    const char* row;
    float weight;
    char* sum;
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

// The warp: sums `num_rows` slices, `stride` bytes apart, into the first.
template <typename T, bool kWeighted>
__device__ __forceinline__ void sum_slices(char* stage, int num_rows, int stride, int bytes,
                                           const float* weights) {
    using V = Vector<T>;
    auto term = [&](const uint4& packed, int i, float* f) {
        V::unpack(packed, f);
        if constexpr (kWeighted) {
            for (int k = 0; k < V::kSize; ++k) f[k] = __fmul_rn(weights[i], f[k]);
        }
    };
#pragma unroll 2
    for (int at = lane_id() * 16; at < bytes; at += kWarp * 16) {
        float sum[V::kSize], next[V::kSize];
        term(*reinterpret_cast<const uint4*>(stage + at), 0, sum);
#pragma unroll 4
        for (int i = 1; i < num_rows; ++i) {
            term(*reinterpret_cast<const uint4*>(stage + i * stride + at), i, next);
            for (int k = 0; k < V::kSize; ++k) sum[k] = __fadd_rn(sum[k], next[k]);
        }
        *reinterpret_cast<uint4*>(stage + at) = V::pack(sum);
    }
}

__device__ __forceinline__ void zero_slice(char* stage, int bytes) {
    for (int at = lane_id() * 16; at < bytes; at += kWarp * 16) {
        *reinterpret_cast<uint4*>(stage + at) = uint4{};
    }
}

// The role of WarpRing::run; `Walk::next(WarpSumJob&)` is called by the whole warp.
template <typename T, typename Walk>
struct WarpSums {
    // Behind the stage: what to do with it once it has landed.
    struct Header {
        char* sum;
        int num_rows, stride, bytes;
        float weight[kWarp];
    };

    Walk walk;
    int row_bytes, stage_bytes, header_offset;
    bool weighted;
    WarpSumJob job{};
    layout::SliceLayout slices{};
    int next_slice = 0;

    __device__ bool load(WarpRing& ring) {
        if (next_slice == slices.num_slices) {
            if (!walk.next(job)) return false;
            slices = slice_for(max(job.num_rows, 1));
            next_slice = 0;
        }
        const int offset = next_slice++ * slices.slice_bytes;
        const int bytes = min(slices.slice_bytes, row_bytes - offset);
        ring.expect(bytes * job.num_rows);
        char* stage = ring.load_stage();
        auto* header = reinterpret_cast<Header*>(stage + header_offset);
        if (lane_id() < job.num_rows) {
            ptx::bulk_load(stage + lane_id() * slices.slice_bytes, job.row + offset, bytes,
                           ring.load_barrier());
            if (weighted) header->weight[lane_id()] = job.weight;
        }
        if (lane_id() == 0) {
            header->sum = job.sum + offset;
            header->num_rows = job.num_rows;
            header->stride = slices.slice_bytes;
            header->bytes = bytes;
        }
        ring.advance_load();
        return true;
    }

    __device__ void work(char* stage) const {
        auto* header = reinterpret_cast<const Header*>(stage + header_offset);
        const int num_rows = header->num_rows, bytes = header->bytes;
        if (num_rows == 0) {
            zero_slice(stage, bytes);
        } else if (weighted) {
            sum_slices<T, true>(stage, num_rows, header->stride, bytes, header->weight);
        } else if (num_rows > 1) {
            sum_slices<T, false>(stage, num_rows, header->stride, bytes, nullptr);
        }
        ptx::fence_proxy_async_smem();
        __syncwarp();
        if (lane_id() == 0) ptx::bulk_store(header->sum, stage, bytes);
    }

    // As large as the stage allows, in whole strides of the warp where there is more than one.
    __device__ layout::SliceLayout slice_for(int num_rows) const {
        int most = stage_bytes / num_rows;
        int step = most >= kWarp * 16 && row_bytes > most ? kWarp * 16 : layout::kBulkAlign;
        int slice = min(most / step * step, row_bytes);
        return {layout::ceil_div(row_bytes, slice), slice};
    }
};

}  // namespace hybrid_ep::device
