// How the kernels divide a block's shared memory. Hopper and Blackwell give a block 227 KB.
#pragma once

#include "device/ring.cuh"
#include "layout/record_layout.h"

namespace hybrid_ep::kernels {

constexpr int kSmemBytes = 227 * 1024;

// Moving: a stage holds a slice of a row; six warps keep the loads of an SM in flight.
constexpr int kMoveWarps = 6;
constexpr int kMoveHeaderBytes = 160;  // PullRows::Header
constexpr int kMaxMoveStages = 8;

HYBRID_EP_HD device::RingShape move_ring(const layout::SliceLayout& slices,
                                         const layout::RecordLayout& record) {
    device::RingShape shape{kMoveWarps, 0, 0, kMoveHeaderBytes};
    shape.stage_bytes = layout::round_up(slices.slice_bytes + record.trailer_bytes(), 32);
    int fits = (kSmemBytes - 128) / (kMoveWarps * (shape.stage_stride() + 8));
    shape.num_stages = layout::min_of(fits, kMaxMoveStages);
    return shape;
}

// Summing: a stage holds the same slice of all rows of a sum.
constexpr int kSumWarps = 9;
constexpr int kSumHeaderBytes = 160;  // SumRows::Header
HYBRID_EP_HD constexpr device::RingShape sum_ring() {
    return {kSumWarps, 3, 8192, kSumHeaderBytes};
}

}  // namespace hybrid_ep::kernels
