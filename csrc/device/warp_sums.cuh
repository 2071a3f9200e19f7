// Sums of rows, for both halves of combine: the walk says which rows and where the sum goes.
//
//   row_0, row_1, ... --TMA loads--> stage --add in fp32, in this order--> stage --TMA store--> sum
//
// A stage holds the same slice of all rows of one sum; the sum replaces the first row's slice. A
// sum starts with its first term (not with zero), rounds each product before adding it, and is
// rounded once at the end, as the torch backend does.
#pragma once

#include "device/vector.cuh"
#include "device/warp_ring.cuh"

namespace hybrid_ep::device {

// One sum, in lane i its i-th row (i < num_rows); no rows make a sum of zero.
struct WarpSumJob {
    int num_rows;
    const char* row;
    float weight;
    char* sum;
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
