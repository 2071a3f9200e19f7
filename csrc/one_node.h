// The runtime of one node: memory through CUDA IPC, kernels that know no network.
#pragma once

#include <limits>

#include "runtime.h"

namespace hybrid_ep {

constexpr Target kOneNode{
    context_of_one_node,
    {
        [](const NodesContext&, const kernels::PublishRoutingParams& p, cudaStream_t stream) {
            kernels::launch_publish_routing(p, stream);
        },
        [](const NodesContext&, const kernels::AssignRowsParams& p, cudaStream_t stream) {
            kernels::launch_assign_rows(p, stream);
        },
        [](const NodesContext&, const kernels::DispatchParams& p, cudaStream_t stream) {
            kernels::launch_dispatch(p, stream);
        },
        [](const NodesContext&, const kernels::CombineParams& p, cudaStream_t stream) {
            kernels::launch_combine(p, stream);
        },
        /*give_up*/ nullptr,
        kernels::launch_copy_peer,
        /*routing_ends_in_assign_rows*/ true,
        /*least_dispatch_blocks*/ 1,
        /*least_combine_blocks*/ 1,
    },
    /*owns_memory*/ true,
    /*may_use_copy_engine*/ true,
    /*most_bytes*/ std::numeric_limits<int64_t>::max(),
};

}  // namespace hybrid_ep
