// How a block divides its shared memory (device/ring.cuh). The numbers were measured, see
// docs/performance.md.
#pragma once

#include "layout/record_layout.h"

namespace hybrid_ep::layout {

constexpr int kBlockSmemBytes = 227 * 1024;  // Hopper and Blackwell
constexpr int kStaticSmemBytes = 12 * 1024;  // at most, of any kernel with a ring
constexpr int kSlotAlign = 128;
constexpr int kMostSlots = 16;  // of a ring; more would not be faster
constexpr int kSlotsRead = 4;   // of dispatch: the newest, which stores may still be reading

// Slots side by side, each at a whole 128 bytes: bulk copies to and from other addresses of shared
// memory take up to twice as long. Behind them a header for each, where one is wanted: what to do
// with what has landed.
struct RingShape {
    int num_slots, slot_bytes, header_bytes;

    HYBRID_EP_HD int slots_bytes() const { return num_slots * slot_bytes; }
    HYBRID_EP_HD int bytes() const { return slots_bytes() + num_slots * header_bytes; }
};

// As many slots as fit where `rings` share a block, beside other things.
HYBRID_EP_HD RingShape ring_of(int slot_bytes, int header_bytes, int rings, int beside = 0) {
    RingShape shape{0, round_up(slot_bytes, kSlotAlign), header_bytes};
    const int room = (kBlockSmemBytes - kStaticSmemBytes - beside) / rings - kSlotAlign;
    shape.num_slots = min_of(room / (shape.slot_bytes + header_bytes), kMostSlots);
    return shape;
}

// Of all the rings of a block, and what aligns the first.
HYBRID_EP_HD int dynamic_smem_bytes(const RingShape& shape, int rings) {
    return rings * round_up(shape.bytes(), kSlotAlign) + kSlotAlign;
}

// Moving: a slot holds a slice of a row, usually all of it, with its trailer.
HYBRID_EP_HD RingShape move_ring(const SliceLayout& slices, const RecordLayout& record) {
    return ring_of(slices.slice_bytes + record.trailer_bytes(), 0, 1);
}

// Scaling: a slot holds a row, and each warp that scales has stages of its own behind the ring.
// More warps are faster; the kernel of several nodes has no registers for as many.
constexpr int kScalersOfOneNode = 18, kScalersOfSeveralNodes = 10;
constexpr int kScaleStages = 4, kScaleStageBytes = 2048;
constexpr int kScaleSmemBytes = kSlotAlign + kScaleStages * kScaleStageBytes;  // of a warp

HYBRID_EP_HD RingShape scale_ring(int row_bytes, int scalers) {
    return ring_of(row_bytes, 0, 1, scalers * kScaleSmemBytes);
}
HYBRID_EP_HD int scale_smem_bytes(const RingShape& shape, int scalers) {
    return dynamic_smem_bytes(shape, 1) + scalers * kScaleSmemBytes;
}

// Summing: a slot holds a slice of one row of a sum. Two rings per block: while the threads of one
// wait for a row, those of the other add.
constexpr int kSumRings = 2;
constexpr int kSumHeaderBytes = 40;
constexpr int kMostSumBytes = 14336;  // of a slice: what the adders of a ring hold in registers

HYBRID_EP_HD RingShape sum_ring(const SliceLayout& slices) {
    return ring_of(slices.slice_bytes, kSumHeaderBytes, kSumRings);
}

}  // namespace hybrid_ep::layout
