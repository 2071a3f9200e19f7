// Lanes and warps.
#pragma once

namespace hybrid_ep::device {

constexpr int kWarp = 32;

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarp; }
__device__ __forceinline__ int warps_per_block() { return blockDim.x / kWarp; }

}  // namespace hybrid_ep::device
