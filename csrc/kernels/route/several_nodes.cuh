// Every rank tells every rank which experts its tokens chose, over several nodes.
//
//   topk_idx --sort, count--> routing inbox of my node's ranks                        publish_tile
//            `--put--> routing inbox of my rail peers --count--> those of their nodes  relay_tiles
//
// The rail peer passes on what came as if the source itself had written it, flags included: so
// a reader of a routing inbox (assign_rows) need not know of nodes. Blocks wait only for the
// blocks of the same number of the rail peers, which have put theirs before they wait.
#pragma once

#include "device/trace.cuh"
#include "kernels/announce.cuh"
#include "kernels/launch.cuh"
#include "kernels/route/tile.cuh"
#include "kernels/several_nodes.h"
#include "network/window.cuh"

namespace hybrid_ep::kernels::several_nodes {

using namespace network;
using namespace routing;

struct PublishRoutingParams {
    NodesContext context;
    Choices choices;
    int num_blocks;
    int32_t* words;  // the layout being made
};

// The whole block: sets the flag of `source` and this block in my node's ranks.
__device__ inline void signal_node(const NodesContext& c, int source, uint64_t epoch) {
    const auto& b = c.nodes.buffer;
    __syncthreads();
    for (int peer = threadIdx.x; peer < c.nodes.ranks_per_node; peer += kThreads) {
        ptx::store_release(c.peer_flag(peer, b.flag(Phase::kRoute, source, blockIdx.x)),
                           flag_value(epoch, b.topk & 0xFFFF));
    }
}

template <typename Network>
__device__ void publish_tile(const PublishRoutingParams& p, const Network& network,
                             const TileSmem& smem, int tile, uint64_t epoch) {
    const NodesContext& c = p.context;
    const auto& b = c.nodes.buffer;
    const kernels::PublishRoutingParams own{c.world, p.choices, p.num_blocks, p.words};
    clear_tile(b, smem);
    sort_tokens(own, smem, tile, epoch);
    __syncthreads();
    push_tile(smem, b, c.world.peers, c.rank_of(c.node, 0), c.nodes.ranks_per_node, c.world.rank,
              tile, epoch);
    __threadfence_system();  // the network reads what this block has just written
    __syncthreads();
    const int bytes = kTileTokens * b.topk * 2;
    char* experts = c.at(b.experts_of(epoch, c.world.rank) + int64_t(tile) * bytes);
    const bool is_last = tile + gridDim.x >= b.num_tiles;  // of this block
    const Signal arrived{c.flag_at(c.nodes.route_flag(c.node, blockIdx.x, epoch)),
                         share_of_step(tile / gridDim.x, is_last), true};
    for (int step = 1; step < c.nodes.num_nodes; ++step) {
        const int node = (c.node + step) % c.nodes.num_nodes;
        network.put_block(experts, experts, bytes, c.rail_peer(node), arrived);
    }
}

// The whole block: what a rail peer's sort_tokens counted, counted again.
__device__ inline void count_tile(const layout::BufferLayout& b, const TileSmem& smem,
                                  const int16_t* experts) {
    for (int i = threadIdx.x; i < kTileTokens * b.topk; i += kThreads) {
        const int expert = smem.experts[i] = experts[i];
        if (expert < 0) continue;
        const int rank = expert / b.num_local_experts;
        const bool first_of_rank = i % b.topk == 0 || experts[i - 1] / b.num_local_experts != rank;
        atomicAdd(&smem.rows_of_expert[expert], 1);
        if (first_of_rank) atomicAdd(&smem.copies_of_rank[rank], 1);
    }
    __syncthreads();
}

// The whole block: what its like at a rail peer has put here goes to my node (invariant "owner
// passes on"). False: give up.
__device__ inline bool relay_tiles(const PublishRoutingParams& p, const TileSmem& smem, int node,
                                   uint64_t epoch) {
    const NodesContext& c = p.context;
    const auto& b = c.nodes.buffer;
    const int source = c.rail_peer(node);
    bool good = true;
    if (threadIdx.x == 0) {
        good =
            await(c, {c.flag_at(c.nodes.route_flag(node, blockIdx.x, epoch)),
                      c.every_other_route(epoch), kAnySignature, Wait::kEveryOtherCall,
                      int(blockIdx.x), Phase::kRoute, source, epoch, Timeout::kForPeer, nullptr});
    }
    if (!__syncthreads_and(good)) return false;
    for (int tile = blockIdx.x; tile < b.num_tiles; tile += gridDim.x) {
        auto* experts = reinterpret_cast<const int16_t*>(c.at(b.experts_of(epoch, source))) +
                        int64_t(tile) * kTileTokens * b.topk;
        clear_tile(b, smem);
        count_tile(b, smem, experts);
        push_tile(smem, b, c.world.peers, c.rank_of(c.node, 0), c.nodes.ranks_per_node, source,
                  tile, epoch);
        __syncthreads();
    }
    signal_node(c, source, epoch);
    return true;
}

// The whole block: until my node's ranks have published theirs. assign_rows would wait for them
// too, but also for what they pass on, and could then not tell which rank is missing.
__device__ inline void await_node_routing(const NodesContext& c, uint64_t epoch) {
    const auto& b = c.nodes.buffer;
    for (int peer = threadIdx.x; peer < c.nodes.ranks_per_node; peer += kThreads) {
        const int source = c.rank_of(c.node, peer);
        wait_flag(c.flag_at(b.flag(Phase::kRoute, source, blockIdx.x)), epoch, b.topk & 0xFFFF,
                  c.world.watch, Phase::kRoute, source, blockIdx.x);
    }
}

template <typename Network>
__global__ void __launch_bounds__(kThreads)
    publish_routing(const __grid_constant__ PublishRoutingParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    const NodesContext& c = p.context;
    if (__syncthreads_or(has_fault(c.world.watch.state))) return;
    const uint64_t epoch = current_epoch(c.world.watch.state, Phase::kRoute);
    const Network network(c);
    const TileSmem smem(dynamic_smem, c.nodes.buffer);
    const Stopwatch publishing(c.world.trace);
    if (blockIdx.x == 0 && warp_id() == 0) {
        announce_to_rail(c, network, announce_route(c.world, p.words, p.choices, epoch));
    }

    for (int tile = blockIdx.x; tile < c.nodes.buffer.num_tiles; tile += gridDim.x) {
        publish_tile(p, network, smem, tile, epoch);
        __syncthreads();
    }
    signal_node(c, c.world.rank, epoch);
    publishing.stop(Span::kPublishRouting, epoch);

    const Stopwatch relaying(c.world.trace);
    for (int step = 1; step < c.nodes.num_nodes; ++step) {
        if (!relay_tiles(p, smem, (c.node + step) % c.nodes.num_nodes, epoch)) return;
    }
    await_node_routing(c, epoch);
    relaying.stop(Span::kRelayRouting, epoch);
}

template <typename Network>
void launch_publish_routing(const NodesContext& context, const kernels::PublishRoutingParams& p,
                            cudaStream_t stream) {
    launch(kKernel<publish_routing<Network>>, {context, p.choices, p.num_blocks, p.words},
           p.num_blocks, kThreads, TileSmem::bytes(context.nodes.buffer), stream);
}

}  // namespace hybrid_ep::kernels::several_nodes
