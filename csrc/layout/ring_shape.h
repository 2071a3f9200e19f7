// How a block divides its shared memory among its warps' rings (device/ring.cuh). The numbers were
// measured, see docs/performance.md.
#pragma once

#include "layout/record_layout.h"

namespace hybrid_ep::layout {

constexpr int kBlockSmemBytes = 227 * 1024;  // Hopper and Blackwell
constexpr int kMaxRingWarps = 12;
constexpr int kStageHeaderBytes = 160;  // of any role: what to do with the stage once it has landed

struct RingShape {
    int num_warps, num_stages, stage_bytes;

    HYBRID_EP_HD int stage_stride() const { return stage_bytes + kStageHeaderBytes; }
    HYBRID_EP_HD int smem_bytes() const {
        return num_warps * num_stages * (stage_stride() + 8) + 128;
    }
    // As many stages for each warp as fit, at most `most`.
    HYBRID_EP_HD RingShape with_stages(int most) const {
        const int fits = (kBlockSmemBytes - 128) / (num_warps * (stage_stride() + 8));
        return {num_warps, min_of(fits, most), stage_bytes};
    }
};

// Moving: a stage holds a slice of a row with its trailer, usually all of it. Two stages a warp are
// faster than more stages of fewer warps, although less is under way.
HYBRID_EP_HD RingShape move_ring(const SliceLayout& slices, const RecordLayout& record) {
    RingShape shape{6, 0, round_up(slices.slice_bytes + record.trailer_bytes(), 32)};
    while (shape.num_warps > 1 && shape.with_stages(2).num_stages < 2) --shape.num_warps;
    return shape.with_stages(2);
}

// Summing: a stage holds the same slice of all rows of a sum. Many warps with one large stage each
// beat fewer warps that load ahead: large bulk copies cost least to start.
HYBRID_EP_HD RingShape sum_ring() { return {12, 1, 16384}; }

}  // namespace hybrid_ep::layout
