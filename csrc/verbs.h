// What the verbs are given: addresses of tensors that Python has checked, an address of 0 where
// there is none. Python passes each of these as a tuple of its fields, in this order.
#pragma once

#include <cstdint>

namespace hybrid_ep {

// The experts of each token.
struct Choices {
    uintptr_t topk_idx;  // [T, topk] of idx_bytes each, rows idx_stride elements apart
    int idx_bytes;
    int64_t idx_stride;
    int num_tokens;
    int align;
    int64_t max_rows;  // < 0: no bound
};

// A layout to be made, and what Python wants to know of it.
struct NewLayout {
    uintptr_t words;
    uintptr_t counts, offsets, required_rows;
};

// What a dispatch sends: tokens, with weights and scales or without.
struct Sent {
    uintptr_t x;  // [T, row_bytes], x_stride bytes apart
    int64_t x_stride;
    int row_bytes;
    uintptr_t weights;  // [T, topk] floats, weights_stride elements apart
    int64_t weights_stride;
    uintptr_t scales;  // [T, scale_bytes], scales_stride bytes apart
    int64_t scales_stride;
    int scale_bytes;
    int num_tokens;
    uintptr_t words;  // of its layout
};

// Where what a dispatch brings goes.
struct Received {
    uintptr_t rows, row_weights, row_scales;
    int64_t num_rows;
};

// A combine: sums of rows come home as y, and values, if there are any, as home_values.
struct Summed {
    uintptr_t rows;  // [M, row_bytes] of kernels::SumType(type)
    int type;
    int row_bytes;
    uintptr_t weights, values;  // [M] floats
    uintptr_t y;                // [T, row_bytes]
    uintptr_t home_values;      // [T, topk] floats
    int num_tokens;
    uintptr_t words;  // of its layout
};

}  // namespace hybrid_ep
