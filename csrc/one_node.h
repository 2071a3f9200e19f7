// The runtime of one node: memory through CUDA IPC, kernels that know no network.
#pragma once

#include <limits>

#include "runtime.h"

namespace hybrid_ep {

// A launcher of one node, which needs no more than its parameters.
template <auto launch, typename Params>
void without_nodes(const NodesContext&, const Params& p, cudaStream_t stream) {
    launch(p, stream);
}

constexpr Target kOneNode{
    context_of_one_node,
    {
        without_nodes<kernels::launch_publish_routing>,
        without_nodes<kernels::launch_assign_rows>,
        without_nodes<kernels::launch_dispatch>,
        without_nodes<kernels::launch_combine_backward>,
        without_nodes<kernels::launch_combine>,
        /*give_up*/ nullptr,
        kernels::launch_copy_peer,
        /*routing_ends_in_assign_rows*/ true,
        /*least_dispatch_blocks*/ 1,
        /*least_combine_blocks*/ 1,
        layout::kScalersOfOneNode,
    },
    /*owns_memory*/ true,
    /*may_use_copy_engine*/ true,
    /*most_bytes*/ std::numeric_limits<int64_t>::max(),
};

}  // namespace hybrid_ep
