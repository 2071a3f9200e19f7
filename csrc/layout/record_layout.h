// The bytes of one token on its way through dispatch: [row | scales | weights], each padded to 16.
#pragma once

#include "layout/bytes.h"

namespace hybrid_ep::layout {

// What tells calls of equal sizes apart: the dtypes of row and scales, and the SMs that a call asks
// for (0: none), which are equal on all ranks.
HYBRID_EP_HD int kind_of_call(int dtypes, int num_sms) { return dtypes | num_sms << 20; }

struct RecordLayout {
    int row_bytes;     // payload, a multiple of 16
    int scale_bytes;   // 0: no scales
    int weight_bytes;  // 0: no weights, else 4 * topk
    int kind;          // of the call

    HYBRID_EP_HD int scales_offset() const { return row_bytes; }
    HYBRID_EP_HD int weights_offset() const { return row_bytes + round_up(scale_bytes, 16); }
    HYBRID_EP_HD int trailer_bytes() const {
        return round_up(scale_bytes, 16) + round_up(weight_bytes, 16);
    }
    HYBRID_EP_HD int bytes() const { return row_bytes + trailer_bytes(); }

    // 16 bits that tell records apart; peers compare them, so that no rank reads another shape.
    HYBRID_EP_HD uint32_t signature() const {
        uint32_t h = uint32_t(row_bytes) * 0x9E3779B1u ^ uint32_t(scale_bytes) * 0x85EBCA77u ^
                     uint32_t(weight_bytes) * 0xC2B2AE3Du ^ uint32_t(kind) * 0x27D4EB2Fu;
        return (h ^ (h >> 16)) & 0xFFFFu;
    }
};

// A row is moved in slices that fit a slot of the ring; the last one takes the trailer along.
struct SliceLayout {
    int num_slices, slice_bytes;

    static HYBRID_EP_HD SliceLayout make(int row_bytes, int max_slice_bytes) {
        SliceLayout s{};
        s.num_slices = ceil_div(row_bytes, max_slice_bytes);
        const int whole = max_slice_bytes % 128 == 0 ? 128 : kBulkAlign;  // cache lines, if asked
        s.slice_bytes = round_up(ceil_div(row_bytes, s.num_slices), whole);
        s.num_slices = ceil_div(row_bytes, s.slice_bytes);
        return s;
    }
};

}  // namespace hybrid_ep::layout
