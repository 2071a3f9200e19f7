// Lanes and warps.
#pragma once

#include <cstdint>

namespace hybrid_ep::device {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarp; }
__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane_id()) - 1; }

// The whole warp: the sum of the values of the lanes up to mine.
__device__ __forceinline__ int warp_inclusive_sum(int value) {
    for (int step = 1; step < kWarp; step *= 2) {
        int other = __shfl_up_sync(kAllLanes, value, step);
        if (lane_id() >= step) value += other;
    }
    return value;
}

}  // namespace hybrid_ep::device
