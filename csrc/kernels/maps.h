// Dense routing maps [T, E] and top-k routing [T, K], one made of the other (hybrid_ep/maps.py).
// Strides count elements.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hybrid_ep::kernels {

struct MapToTopkParams {
    const bool* map;  // [T, E]
    int64_t map_stride, map_step;
    const float* probs;  // [T, E]; null: none
    int64_t probs_stride, probs_step;
    int num_tokens, num_experts, topk;
    int16_t* topk_idx;  // [T, K]
    float* weights;     // [T, K]
    int32_t* most;      // [num_blocks] the most experts of a token, of those that a block takes
    int num_blocks;     // at least 1
};
void launch_map_to_topk(const MapToTopkParams& p, cudaStream_t stream);

struct TopkToDenseParams {
    const float* values;   // [T, K]
    const void* topk_idx;  // [T, K], idx_bytes each
    int idx_bytes, num_tokens, topk, num_experts;
    float* dense;  // [T, E]
};
void launch_topk_to_dense(const TopkToDenseParams& p, cudaStream_t stream);

}  // namespace hybrid_ep::kernels
