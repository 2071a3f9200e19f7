// What the verbs are given: tensors that Python has checked, null where there is none. Python
// passes each of these as a tuple of its fields, in this order; the kernels get them as they are.
#pragma once

#include <cstdint>

namespace hybrid_ep {

// The experts of each token.
struct Choices {
    const void* topk_idx;  // [T, topk] of idx_bytes each, rows idx_stride elements apart
    int idx_bytes;
    int64_t idx_stride;
    int num_tokens;
    int align;
    int64_t max_rows;     // < 0: no bound
    const int32_t* most;  // [num_most] the largest is the most experts of a token, before the last
    int num_most;         // were left out; none where that is not known
    int topk_slots;       // for the experts of a token, topk at most
};

// A layout to be made, and what Python wants to know of it.
struct NewLayout {
    int32_t* words;
    int32_t *counts, *offsets, *required_rows;
    int32_t* overflow;       // 1 where rows were dropped, else 0
    int64_t* padded_counts;  // [num_local_experts] rows of each, with padding, within the bound
};

// What a dispatch sends: a row for each token, with weights and scales or without.
struct Sent {
    const char* x;  // [T, row_bytes], x_stride bytes apart
    int64_t x_stride;
    int row_bytes;
    const float* weights;  // [T, topk], weights_stride elements apart
    int64_t weights_stride;
    const char* scales;  // [T, scale_bytes], scales_stride bytes apart
    int64_t scales_stride;
    int scale_bytes;
    int dtypes;  // of x and the scales, as a number: peers must have the same
    int num_tokens;
    int32_t* words;  // of its layout
    int num_sms;     // that the call may take; 0: those of the Config
};

// Where what it brings goes: a row for each copy of a token and expert, and padding.
struct Received {
    char* rows;      // [M, row_bytes]
    float* weights;  // [M]
    char* scales;    // [M, scale_bytes]
    int64_t num_rows;
};

enum class SumType : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// What a weighted combine summed, for its backward: a dispatch that brings the gradient of a
// token's sum to each of its rows. Received are the rows' gradients, weighted, and as weights the
// gradients of the weights.
struct Weighted {
    const char* rows;      // [M, row_bytes]
    const float* weights;  // [M]
    SumType type;
};

// A combine: sums of rows come home as y, and values, if there are any, as home_values.
struct Summed {
    const char* rows;  // [M, row_bytes]
    int64_t num_rows;
    SumType type;
    int row_bytes;
    const float *weights, *values;  // [M]
    char* y;                        // [T, row_bytes]
    float* home_values;             // [T, topk]
    int num_tokens;
    int32_t* words;  // of its layout
    int num_sms;     // as of Sent
};

}  // namespace hybrid_ep
