// What the host runtime of several nodes launches. Parameters travel by value.
#pragma once

#include "kernels/kernels.h"
#include "network/context.h"

namespace hybrid_ep::network {

class NvshmemNetwork;
class LoopbackNetwork;

}  // namespace hybrid_ep::network

namespace hybrid_ep::kernels::several_nodes {

struct PublishRoutingParams {
    NodesContext context;
    Choices choices;
    int num_blocks;
    int32_t* words;  // the layout being made
};

// After assign_rows of the same call: what later calls with this handle must know of the routing.
struct KeepRoutingParams {
    NodesContext context;
    int32_t* words;
};
void launch_keep_routing(const KeepRoutingParams& p, cudaStream_t stream);

struct DispatchParams {
    NodesContext context;
    kernels::DispatchParams dispatch;  // as on one node; its blocks come behind those that send
    int num_send_blocks;               // 0 where it does not pull
};

struct CombineParams {
    NodesContext context;
    Summed summed;
    int num_push_blocks, num_forward_blocks, num_home_blocks;
    layout::SliceLayout slices;
    layout::RingShape ring;  // of layout::kSumRings
};

struct GiveUpParams {
    NodesContext context;
    uint64_t reason;  // of errors.py
};

// Of the kernels that use a network; instantiated in kernels/nvshmem/ and kernels/loopback.cu.
template <typename Network>
void launch_publish_routing(const PublishRoutingParams& p, cudaStream_t stream);
template <typename Network>
void launch_dispatch(const DispatchParams& p, cudaStream_t stream);
template <typename Network>
void launch_combine(const CombineParams& p, cudaStream_t stream);
template <typename Network>
void launch_give_up(const GiveUpParams& p, cudaStream_t stream);

// One set of them for each network.
struct Launchers {
    void (*publish_routing)(const PublishRoutingParams& p, cudaStream_t stream);
    void (*dispatch)(const DispatchParams& p, cudaStream_t stream);
    void (*combine)(const CombineParams& p, cudaStream_t stream);
    void (*give_up)(const GiveUpParams& p, cudaStream_t stream);
};
template <typename Network>
constexpr Launchers kLaunchersOver{launch_publish_routing<Network>, launch_dispatch<Network>,
                                   launch_combine<Network>, launch_give_up<Network>};

// Waits until everything that this rank's kernels have put or signalled through NVSHMEM has
// arrived, on all queues; no kernel may be putting meanwhile.
void complete_puts();

}  // namespace hybrid_ep::kernels::several_nodes
