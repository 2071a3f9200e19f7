#include "device/warp.cuh"
#include "kernels/launch.cuh"
#include "kernels/maps.h"

namespace hybrid_ep::kernels {
namespace {

using namespace device;

constexpr int kThreads = 512;
constexpr int kTokens = kThreads / kWarp;  // of a block at a time, a warp each

// The whole warp, 32 experts at a time: an expert's top-k slot is how many come before it. Returns
// how many the token has.
__device__ __forceinline__ int list_experts(const MapToTopkParams& p, int64_t token) {
    const bool* map = p.map + token * p.map_stride;
    const float* probs = p.probs + token * p.probs_stride;
    int16_t* topk_idx = p.topk_idx + token * p.topk;
    float* weights = p.weights + token * p.topk;
    int found = 0;
    for (int first = 0; first < p.num_experts; first += kWarp) {
        const int expert = first + lane_id();
        const bool has = expert < p.num_experts && map[expert * p.map_step];
        const uint32_t have = __ballot_sync(kAllLanes, has);
        const int k = found + __popc(have & lanes_below());
        if (has && k < p.topk) {
            topk_idx[k] = int16_t(expert);
            if (p.probs != nullptr) weights[k] = probs[expert * p.probs_step];
        }
        found += __popc(have);
    }
    for (int k = found + lane_id(); k < p.topk; k += kWarp) {
        topk_idx[k] = -1;
        if (p.probs != nullptr) weights[k] = 0.f;
    }
    return found;
}

__global__ void __launch_bounds__(kThreads) map_to_topk(const __grid_constant__ MapToTopkParams p) {
    __shared__ int most_of_warp[kTokens];
    int most = 0;
    for (int64_t token = int64_t(blockIdx.x) * kTokens + warp_id(); token < p.num_tokens;
         token += int64_t(gridDim.x) * kTokens) {
        most = max(most, list_experts(p, token));
    }
    if (lane_id() == 0) most_of_warp[warp_id()] = most;
    __syncthreads();
    if (warp_id() != 0) return;
    most = __reduce_max_sync(kAllLanes, lane_id() < kTokens ? most_of_warp[lane_id()] : 0);
    if (lane_id() == 0) p.most[blockIdx.x] = most;
}

// A warp per token: zeros first, then the slots, a lane each, 32 at a time. Of the lanes that name
// one expert the first adds their values to what is there, in the order of the slots.
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    topk_to_dense(const __grid_constant__ TopkToDenseParams p) {
    const int64_t token = int64_t(blockIdx.x) * kTokens + warp_id();
    if (token >= p.num_tokens) return;
    const auto* topk_idx = static_cast<const Index*>(p.topk_idx) + token * p.topk;
    const float* values = p.values + token * p.topk;
    float* dense = p.dense + token * p.num_experts;
    for (int expert = lane_id(); expert < p.num_experts; expert += kWarp) dense[expert] = 0.f;
    for (int first = 0; first < p.topk; first += kWarp) {
        const int k = first + lane_id();
        const int64_t named = k < p.topk ? int64_t(topk_idx[k]) : -1;
        const int expert = 0 <= named && named < p.num_experts ? int(named) : -1;
        __syncwarp();  // other lanes have written to dense
        uint32_t same = __match_any_sync(kAllLanes, expert);
        if (expert < 0 || (same & lanes_below()) != 0) continue;
        float sum = first == 0 ? 0.f : dense[expert];
        for (; same != 0; same &= same - 1) {
            sum = __fadd_rn(sum, values[first + __ffs(int(same)) - 1]);
        }
        dense[expert] = sum;
    }
}

}  // namespace

void launch_map_to_topk(const MapToTopkParams& p, cudaStream_t stream) {
    launch(kKernel<map_to_topk>, p, p.num_blocks, kThreads, 0, stream);
}

void launch_topk_to_dense(const TopkToDenseParams& p, cudaStream_t stream) {
    if (p.num_tokens == 0) return;
    const auto kernel = p.idx_bytes == 2   ? kKernel<topk_to_dense<int16_t>>
                        : p.idx_bytes == 4 ? kKernel<topk_to_dense<int32_t>>
                                           : kKernel<topk_to_dense<int64_t>>;
    const int blocks = (p.num_tokens + kTokens - 1) / kTokens;
    launch(kernel, p, blocks, kThreads, 0, stream);
}

}  // namespace hybrid_ep::kernels
