// The launchers of several nodes, one set for each network.
#pragma once

#include "kernels/kernels.h"
#include "network/context.h"

namespace hybrid_ep::network {

class NvshmemNetwork;
class LoopbackNetwork;

}  // namespace hybrid_ep::network

namespace hybrid_ep::kernels::several_nodes {

// Of the kernels that use a network; instantiated in kernels/nvshmem/ and kernels/loopback.cu.
template <typename Network>
void launch_publish_routing(const NodesContext& context, const kernels::PublishRoutingParams& p,
                            cudaStream_t stream);
template <typename Network>
void launch_dispatch(const NodesContext& context, const kernels::DispatchParams& p,
                     cudaStream_t stream);
template <typename Network>
void launch_combine_backward(const NodesContext& context, const kernels::CombineBackwardParams& p,
                             cudaStream_t stream);
template <typename Network>
void launch_combine(const NodesContext& context, const kernels::CombineParams& p,
                    cudaStream_t stream);
template <typename Network>
void launch_give_up(const NodesContext& context, const uint64_t& reason, cudaStream_t stream);

// assign_rows of one node, and what keeps its routing.
void launch_assign_rows(const NodesContext& context, const AssignRowsParams& p,
                        cudaStream_t stream);

// A block of dispatch sends or pulls; one of combine pushes, forwards or adds at home.
constexpr int kDispatchRoles = 2, kCombineRoles = 3;

template <typename Network>
constexpr Launchers kLaunchersOver{
    launch_publish_routing<Network>,
    launch_assign_rows,
    launch_dispatch<Network>,
    launch_combine_backward<Network>,
    launch_combine<Network>,
    launch_give_up<Network>,
    /*copy_peer*/ nullptr,
    /*routing_ends_in_assign_rows*/ false,
    /*least_dispatch_blocks*/ kDispatchRoles,
    /*least_combine_blocks*/ kCombineRoles,
    layout::kScalersOfSeveralNodes,
};

// Waits until everything that this rank's kernels have put or signalled through NVSHMEM has
// arrived, on all queues; no kernel may be putting meanwhile.
void complete_puts();

}  // namespace hybrid_ep::kernels::several_nodes
