// A tile of tokens while its routing is published: in shared memory, sorted and counted.
//
//   topk_idx [T, K] --distinct, ascending--> experts [tile, K] int16
//                   --count--> rows per expert, copies per rank
//                   `--> the home half of the handle: other ranks of a token, top-k slot -> place
//
// A warp looks at 32 / K tokens at once, a lane per top-k slot.
#pragma once

#include "device/flag.cuh"
#include "device/warp.cuh"
#include "kernels/kernels.h"

namespace hybrid_ep::kernels::routing {

using namespace device;
using layout::kTileTokens;
using layout::Phase;

constexpr int kThreads = 1024;
constexpr int kTokensPerWarp = kTileTokens / (kThreads / kWarp);

struct TileSmem {
    int* rows_of_expert;  // [num_experts]
    int* copies_of_rank;  // [num_ranks]
    int16_t* experts;     // [kTileTokens, topk]

    __device__ TileSmem(char* base, const layout::BufferLayout& b)
        : rows_of_expert(reinterpret_cast<int*>(base)),
          copies_of_rank(rows_of_expert + b.num_experts),
          experts(reinterpret_cast<int16_t*>(base + counters_bytes(b))) {}

    static __host__ __device__ int counters_bytes(const layout::BufferLayout& b) {
        return layout::round_up((b.num_experts + b.num_ranks) * 4, 16);
    }
    static int bytes(const layout::BufferLayout& b) {
        return counters_bytes(b) + kTileTokens * b.topk * 2;
    }
};

__device__ inline int64_t load_index(const PublishRoutingParams& p, int64_t token, int k) {
    int64_t at = token * p.choices.idx_stride + k;
    if (p.choices.idx_bytes == 2) return static_cast<const int16_t*>(p.choices.topk_idx)[at];
    if (p.choices.idx_bytes == 4) return static_cast<const int32_t*>(p.choices.topk_idx)[at];
    return static_cast<const int64_t*>(p.choices.topk_idx)[at];
}

__device__ inline int checked_expert(const PublishRoutingParams& p, int64_t token, int k,
                                     uint64_t epoch) {
    int64_t expert = load_index(p, token, k);
    if (expert >= -1 && expert < p.context.buffer.num_experts) return int(expert);
    report_fault(p.context.watch, FaultKind::kBadExpert, Phase::kRoute, int(token), k, epoch,
                 uint64_t(expert));
    return -1;
}

__device__ inline uint32_t group_lanes(int topk, int group) {
    const uint32_t lanes = topk == kWarp ? kAllLanes : (1u << topk) - 1;
    return group < kWarp / topk ? lanes << (group * topk) : 0;
}

// The warp's tokens of a tile, 32 / topk at a time: a lane per top-k slot.
__device__ inline void sort_tokens(const PublishRoutingParams& p, const TileSmem& smem, int tile,
                                   uint64_t epoch) {
    const auto& b = p.context.buffer;
    const int per_step = kWarp / b.topk, group = lane_id() / b.topk, k = lane_id() % b.topk;
    layout::HandleView handle(p.words, p.context.handle);

    for (int base = 0; base < kTokensPerWarp; base += per_step) {
        int in_tile = warp_id() * kTokensPerWarp + base + group;
        int64_t token = int64_t(tile) * kTileTokens + in_tile;
        bool active =
            group < per_step && base + group < kTokensPerWarp && token < p.choices.num_tokens;
        int expert = active ? checked_expert(p, token, k, epoch) : -1;

        // the first top-k slot of an expert speaks for it
        uint32_t key = expert >= 0 ? uint32_t(group) << 24 | uint32_t(expert)
                                   : 0x80000000u | uint32_t(lane_id());
        uint32_t same = __match_any_sync(kAllLanes, key);  // all lanes, so not behind an &&
        bool speaks = expert >= 0 && __ffs(same) - 1 == lane_id();
        int spoken = speaks ? expert : -1;
        int rank = expert >= 0 ? expert / b.num_local_experts : 0;
        int rank_begin = rank * b.num_local_experts;

        int place = 0;
        bool first_of_rank = speaks;
        for (int j = 0; j < b.topk; ++j) {
            int other = __shfl_sync(kAllLanes, spoken, min(group * b.topk + j, kWarp - 1));
            if (other >= 0 && other < expert) {
                ++place;
                if (other >= rank_begin) first_of_rank = false;
            }
        }
        const bool is_other = first_of_rank && rank != p.context.rank;
        const uint32_t others = __ballot_sync(kAllLanes, is_other) & group_lanes(b.topk, group);
        int others_before = 0;
        for (int j = 0; j < b.topk; ++j) {
            const int lane = min(group * b.topk + j, kWarp - 1);
            const int other = __shfl_sync(kAllLanes, rank, lane);
            if ((others >> lane & 1) && other < rank) ++others_before;
        }

        if (speaks) {
            smem.experts[in_tile * b.topk + place] = int16_t(expert);
            atomicAdd(&smem.rows_of_expert[expert], 1);
            if (first_of_rank) atomicAdd(&smem.copies_of_rank[rank], 1);
        }
        if (active) {
            handle.places[token * b.topk + k] = int8_t(expert >= 0 ? place : -1);
            if (k == 0) handle.num_others[token] = uint8_t(__popc(others));
            if (is_other && b.most_others > 0)
                handle.others[token * b.most_others + others_before] = rank;
        }
    }
}

// The whole block, before sort_tokens: no expert is chosen yet.
__device__ inline void clear_tile(const layout::BufferLayout& b, const TileSmem& smem) {
    for (int i = threadIdx.x; i < b.num_experts + b.num_ranks; i += kThreads) {
        smem.rows_of_expert[i] = 0;
    }
    for (int i = threadIdx.x; i < kTileTokens * b.topk; i += kThreads) smem.experts[i] = -1;
    __syncthreads();
}

// The whole block: what the ranks [first_rank, first_rank + num_peers) need to know of a tile of
// `source` goes straight into their memory; `peers` begins with that of first_rank.
__device__ inline void push_tile(const TileSmem& smem, const layout::BufferLayout& b,
                                 const Peers& peers, int first_rank, int num_peers, int source,
                                 int tile, uint64_t epoch) {
    const int num_vectors = kTileTokens * b.topk * 2 / 16;
    for (int i = threadIdx.x; i < num_peers * num_vectors; i += kThreads) {
        int peer = i / num_vectors, vector = i % num_vectors;
        auto* to = reinterpret_cast<uint4*>(peers.base[peer] + b.experts_of(epoch, source));
        to[int64_t(tile) * num_vectors + vector] =
            reinterpret_cast<const uint4*>(smem.experts)[vector];
    }
    const int width = b.num_local_experts + 1;
    for (int i = threadIdx.x; i < num_peers * width; i += kThreads) {
        int peer = i / width, column = i % width, rank = first_rank + peer;
        auto* to = reinterpret_cast<uint16_t*>(peers.base[peer] + b.counts_of(epoch, source));
        to[int64_t(tile) * width + column] = uint16_t(
            column < b.num_local_experts ? smem.rows_of_expert[rank * b.num_local_experts + column]
                                         : smem.copies_of_rank[rank]);
    }
}

}  // namespace hybrid_ep::kernels::routing
