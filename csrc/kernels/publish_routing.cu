// Every rank tells every rank which experts its tokens chose.
//
//   topk_idx [T, K] --distinct, ascending--> experts [T, K] int16 --push--> routing inbox of all
//                   --count per chunk------> rows per expert, copies ---push---^
//                   `--> the home half of the handle: ranks per token, slot -> place
//
// A block owns chunks of kChunkTokens tokens; a warp looks at 32 / K tokens at once, a lane per
// slot. All max_tokens are published, tokens beyond T as having no expert, so T is free to differ.
#include "device/flag.cuh"
#include "device/trace.cuh"
#include "device/warp.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using layout::kChunkTokens;
using layout::Phase;

constexpr int kThreads = 256;
constexpr int kTokensPerWarp = kChunkTokens / (kThreads / kWarp);

struct Smem {
    int* rows_of_expert;  // [num_experts]
    int* copies_of_rank;  // [num_ranks]
    int16_t* experts;     // [kChunkTokens, topk]

    __device__ Smem(char* base, const layout::BufferLayout& b)
        : rows_of_expert(reinterpret_cast<int*>(base)),
          copies_of_rank(rows_of_expert + b.num_experts),
          experts(reinterpret_cast<int16_t*>(base + counters_bytes(b))) {}

    static __host__ __device__ int counters_bytes(const layout::BufferLayout& b) {
        return layout::round_up((b.num_experts + b.num_ranks) * 4, 16);
    }
    static int bytes(const layout::BufferLayout& b) {
        return counters_bytes(b) + kChunkTokens * b.topk * 2;
    }
};

__device__ int64_t load_index(const PublishRoutingParams& p, int64_t token, int slot) {
    int64_t at = token * p.idx_stride + slot;
    if (p.idx_bytes == 2) return static_cast<const int16_t*>(p.topk_idx)[at];
    if (p.idx_bytes == 4) return static_cast<const int32_t*>(p.topk_idx)[at];
    return static_cast<const int64_t*>(p.topk_idx)[at];
}

__device__ int checked_expert(const PublishRoutingParams& p, int64_t token, int slot,
                              uint64_t epoch) {
    int64_t expert = load_index(p, token, slot);
    if (expert >= -1 && expert < p.context.buffer.num_experts) return int(expert);
    report_fault(p.context.watch, FaultKind::kBadExpert, Phase::kRoute, int(token), slot, epoch,
                 uint64_t(expert));
    return -1;
}

// The warp's tokens of a chunk, 32 / topk at a time: a lane per slot.
__device__ void sort_tokens(const PublishRoutingParams& p, const Smem& smem, int chunk,
                            uint64_t epoch) {
    const auto& b = p.context.buffer;
    const int per_step = kWarp / b.topk, group = lane_id() / b.topk, slot = lane_id() % b.topk;
    layout::HandleView handle(p.words, p.context.handle);

    for (int base = 0; base < kTokensPerWarp; base += per_step) {
        int in_chunk = warp_id() * kTokensPerWarp + base + group;
        int64_t token = int64_t(chunk) * kChunkTokens + in_chunk;
        bool active = group < per_step && base + group < kTokensPerWarp && token < p.num_tokens;
        int expert = active ? checked_expert(p, token, slot, epoch) : -1;

        // the first slot of an expert speaks for it
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
        uint32_t firsts = __ballot_sync(kAllLanes, first_of_rank);
        uint32_t own = __ballot_sync(kAllLanes, expert >= 0 && rank == p.context.rank);

        if (speaks) {
            smem.experts[in_chunk * b.topk + place] = int16_t(expert);
            atomicAdd(&smem.rows_of_expert[expert], 1);
            if (first_of_rank) atomicAdd(&smem.copies_of_rank[rank], 1);
        }
        if (active) {
            handle.places[token * b.topk + slot] = int8_t(expert >= 0 ? place : -1);
            uint32_t group_lanes = (b.topk == 32 ? 0xFFFFFFFFu : (1u << b.topk) - 1)
                                   << (group * b.topk);
            if (slot == 0) {
                const bool travels = firsts & ~own & group_lanes;
                handle.home_copies[token] = uint8_t(__popc(firsts & group_lanes)) |
                                            (travels ? layout::HandleView::kTravels : 0);
            }
        }
    }
}

// What each rank needs to know of the chunk goes straight into its memory.
__device__ void push_chunk(const PublishRoutingParams& p, const Smem& smem, int chunk,
                           uint64_t epoch) {
    const auto& b = p.context.buffer;
    const int num_vectors = kChunkTokens * b.topk * 2 / 16;
    for (int i = threadIdx.x; i < b.num_ranks * num_vectors; i += kThreads) {
        int peer = i / num_vectors, vector = i % num_vectors;
        auto* to = reinterpret_cast<uint4*>(p.context.peers.base[peer] +
                                            b.experts_of(epoch, p.context.rank));
        to[int64_t(chunk) * num_vectors + vector] =
            reinterpret_cast<const uint4*>(smem.experts)[vector];
    }
    const int width = b.num_local_experts + 1;
    for (int i = threadIdx.x; i < b.num_ranks * width; i += kThreads) {
        int peer = i / width, column = i % width;
        auto* to = reinterpret_cast<uint16_t*>(p.context.peers.base[peer] +
                                               b.counts_of(epoch, p.context.rank));
        to[int64_t(chunk) * width + column] = uint16_t(
            column < b.num_local_experts ? smem.rows_of_expert[peer * b.num_local_experts + column]
                                         : smem.copies_of_rank[peer]);
    }
}

__global__ void __launch_bounds__(kThreads) publish_routing(const PublishRoutingParams p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    const auto& b = p.context.buffer;
    ptx::let_next_kernel_start();
    if (has_fault(p.context.watch.state)) return;
    const uint64_t epoch = current_epoch(p.context.watch.state, Phase::kRoute);
    Smem smem(dynamic_smem, b);
    const Stopwatch stopwatch(p.context.trace);

    for (int chunk = blockIdx.x; chunk < b.num_chunks; chunk += gridDim.x) {
        for (int i = threadIdx.x; i < b.num_experts + b.num_ranks; i += kThreads) {
            smem.rows_of_expert[i] = 0;
        }
        for (int i = threadIdx.x; i < kChunkTokens * b.topk; i += kThreads) smem.experts[i] = -1;
        __syncthreads();
        sort_tokens(p, smem, chunk, epoch);
        __syncthreads();
        push_chunk(p, smem, chunk, epoch);
        __syncthreads();
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        layout::HandleView handle(p.words, p.context.handle);
        handle.header[layout::HandleLayout::kNumTokens] = p.num_tokens;
    }
    signal_all_ranks(p.context.peers, b, Phase::kRoute, p.context.rank, blockIdx.x, epoch,
                     b.topk & 0xFFFF);
    stopwatch.stop(Span::kPublishRouting, epoch);
}

}  // namespace

void launch_publish_routing(const PublishRoutingParams& p, cudaStream_t stream) {
    launch(publish_routing, p, p.num_blocks, kThreads, Smem::bytes(p.context.buffer), stream);
}

}  // namespace hybrid_ep::kernels
