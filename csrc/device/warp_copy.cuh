// Copies between global memories by a warp's ordinary accesses.
#pragma once

#include <cstddef>

#include "device/warp.cuh"

namespace hybrid_ep::device {

// The whole warp; a multiple of 16 bytes, aligned so. Eight loads a lane are under way at once:
// with one, the latency of memory bounds a warp to less than 1 GB/s.
__device__ inline void copy_warp(void* to, const void* from, size_t bytes) {
    constexpr int kInFlight = 8;
    auto* target = static_cast<uint4*>(to);
    auto* source = static_cast<const uint4*>(from);
    const size_t end = bytes / 16;
    size_t at = lane_id();
    for (; at + (kInFlight - 1) * kWarp < end; at += kInFlight * kWarp) {
        uint4 values[kInFlight];
        for (int i = 0; i < kInFlight; ++i) values[i] = source[at + i * kWarp];
        for (int i = 0; i < kInFlight; ++i) target[at + i * kWarp] = values[i];
    }
    for (; at < end; at += kWarp) target[at] = source[at];
    __syncwarp();
}

}  // namespace hybrid_ep::device
