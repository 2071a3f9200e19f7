// What a handle of several nodes must know after the routing inbox has been overwritten: the
// experts of my tokens, and which ranks of my node read the tokens that pass through my windows.
#include "device/flag.cuh"
#include "kernels/launch.cuh"
#include "kernels/several_nodes.h"

namespace hybrid_ep::kernels::several_nodes {
namespace {

using namespace device;
using layout::Phase;

constexpr int kThreads = 256;

struct KeepRoutingParams {
    NodesContext context;
    int32_t* words;
};

// One bit for each rank of my node that owns one of the token's experts.
__device__ uint32_t readers_of(const NodesContext& c, const int16_t* experts) {
    const auto& b = c.nodes.buffer;
    uint32_t readers = 0;
    for (int place = 0; place < b.topk && experts[place] >= 0; ++place) {
        const int local = experts[place] / b.num_local_experts - c.rank_of(c.node, 0);
        if (local >= 0 && local < c.nodes.ranks_per_node) readers |= 1u << local;
    }
    return readers;
}

// A thread per token of a rail peer, or of mine.
__global__ void __launch_bounds__(kThreads)
    keep_routing(const __grid_constant__ KeepRoutingParams p) {
    const NodesContext& c = p.context;
    const auto& b = c.nodes.buffer;
    if (has_fault(c.world.watch.state)) return;
    const uint64_t epoch = current_epoch(c.world.watch.state, Phase::kRoute) - 1;  // just closed
    const int blocks_per_node = gridDim.x / c.nodes.num_nodes;
    const int node = blockIdx.x / blocks_per_node;
    const int token = blockIdx.x % blocks_per_node * kThreads + threadIdx.x;
    if (token >= b.max_tokens) return;
    auto* experts = reinterpret_cast<const int16_t*>(c.at(b.experts_of(epoch, c.rail_peer(node)))) +
                    int64_t(token) * b.topk;
    c.kept.readers_of(p.words, node)[token] = readers_of(c, experts);
    if (node == c.node) {
        int16_t* kept = c.kept.experts_of(p.words, token);
        for (int place = 0; place < b.topk; ++place) kept[place] = experts[place];
    }
}

}  // namespace

void launch_assign_rows(const NodesContext& context, const AssignRowsParams& p,
                        cudaStream_t stream) {
    kernels::launch_assign_rows(p, stream);
    const int blocks_per_node = layout::ceil_div(context.nodes.buffer.max_tokens, kThreads);
    const KeepRoutingParams keep{context, p.layout.words};
    launch(kKernel<keep_routing>, keep, blocks_per_node * context.nodes.num_nodes, kThreads, 0,
           stream);
}

}  // namespace hybrid_ep::kernels::several_nodes
