// A rank makes no more calls: its rail peers hear why, from a kernel, as hosts have no network.
#pragma once

#include "kernels/launch.cuh"
#include "kernels/several_nodes.h"

namespace hybrid_ep::kernels::several_nodes {

struct GiveUpParams {
    NodesContext context;
    uint64_t reason;  // of errors.py
};

// One thread.
template <typename Network>
__global__ void give_up(const __grid_constant__ GiveUpParams p) {
    const NodesContext& c = p.context;
    const Network network(c);
    uint64_t* word = c.flag_at(c.nodes.buffer.gave_up(c.world.rank));
    for (int node = 0; node < c.nodes.num_nodes; ++node) {
        if (node != c.node) network.signal({word, p.reason}, c.rail_peer(node));
    }
}

template <typename Network>
void launch_give_up(const NodesContext& context, const uint64_t& reason, cudaStream_t stream) {
    launch(kKernel<give_up<Network>>, {context, reason}, 1, 1, 0, stream);
}

}  // namespace hybrid_ep::kernels::several_nodes
