// How a block divides its shared memory among its warps' rings (device/warp_ring.cuh).
#pragma once

#include "layout/record_layout.h"

namespace hybrid_ep::layout {

struct WarpRingShape {
    int num_warps, num_stages, stage_bytes;

    static constexpr int kSmemBytes = 220 * 1024;         // of a block's 227 KB; the rest is static
    static constexpr int kMoveWarps = 6, kSumWarps = 12;  // of a block, at most
    static constexpr int kHeaderBytes = 160;  // what to do with a stage once it has landed

    // A multiple of 128 bytes: bulk copies of other stages would take up to twice as long.
    HYBRID_EP_HD int stage_stride() const { return round_up(stage_bytes + kHeaderBytes, 128); }
    HYBRID_EP_HD int smem_bytes() const {
        return num_warps * num_stages * (stage_stride() + 8) + 128;
    }
    // As many stages for each warp as fit, at most `most`.
    HYBRID_EP_HD WarpRingShape with_stages(int most) const {
        const int fits = (kSmemBytes - 128) / (num_warps * (stage_stride() + 8));
        return {num_warps, min_of(fits, most), stage_bytes};
    }
};

// Moving: a stage holds a slice of a row with its trailer, usually all of it.
HYBRID_EP_HD WarpRingShape move_warp_ring(const SliceLayout& slices, const RecordLayout& record) {
    WarpRingShape shape{WarpRingShape::kMoveWarps, 0,
                        round_up(slices.slice_bytes + record.trailer_bytes(), 32)};
    while (shape.num_warps > 1 && shape.with_stages(2).num_stages < 2) --shape.num_warps;
    return shape.with_stages(2);
}

// Summing: a stage holds the same slice of all rows of a sum.
HYBRID_EP_HD WarpRingShape sum_warp_ring() { return {WarpRingShape::kSumWarps, 1, 16384}; }

}  // namespace hybrid_ep::layout
