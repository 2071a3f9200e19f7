// What the host runtime of several nodes launches. Parameters travel by value.
#pragma once

#include "kernels/kernels.h"
#include "layout/relay_layout.h"
#include "put_queue.h"

namespace hybrid_ep::kernels {

// What a put does to a flag of the peer once its bytes are there. Puts are not ordered among each
// other: whoever waits for several of them waits for a flag that each adds to.
struct Signal {
    uint64_t* flag;  // named by its place in my memory
    uint64_t value;
    bool adds;  // to the flag; else sets it
};

// What every kernel of several nodes knows.
struct NodeContext {
    Context world;  // of all ranks; its peers are those of my node
    // For a network without cards (device/loopback_network.cuh): all nodes of my rail, and where
    // puts are posted to a thread.
    Peers rails;
    PutQueue queue;
    int node, local_rank;
    uint64_t num_routes;  // made before the memory was zeroed
    bool uses_mapped;     // a rail peer's memory is used where it is mapped; else all is put
    layout::RelayLayout relay;
    layout::RelayHandleLayout kept;

    HYBRID_EP_HD int rank_of(int of_node, int of_local_rank) const {
        return of_node * relay.ranks_per_node + of_local_rank;
    }
    HYBRID_EP_HD layout::PushSlot push_slot(int of_node, uint64_t call, int chunk) const {
        return relay.push_slot(of_node, node, call, chunk);
    }
    // How many routes with a number of the same parity, up to this one, since the memory was
    // zeroed.
    HYBRID_EP_HD uint64_t every_other_route(uint64_t route) const {
        return (route + 1) / 2 - (num_routes + route % 2) / 2;
    }
    HYBRID_EP_HD int rail_peer(int of_node) const { return rank_of(of_node, local_rank); }
    HYBRID_EP_HD char* mine() const { return world.mine(); }
    HYBRID_EP_HD char* peer(int of_local_rank) const { return world.peers.base[of_local_rank]; }
    HYBRID_EP_HD char* at(int64_t offset) const { return mine() + offset; }
    HYBRID_EP_HD uint64_t* flag_at(int64_t offset) const {
        return reinterpret_cast<uint64_t*>(at(offset));
    }
    HYBRID_EP_HD uint64_t* peer_flag(int of_local_rank, int64_t offset) const {
        return reinterpret_cast<uint64_t*>(peer(of_local_rank) + offset);
    }
};

struct SpreadRoutingParams {
    NodeContext context;
    Choices choices;
    int num_blocks;
    int32_t* words;  // the layout being made
};

// After assign_rows of the same call: what later calls with this handle must know of the routing.
struct KeepRoutingParams {
    NodeContext context;
    int32_t* words;
};
void launch_keep_routing(const KeepRoutingParams& p, cudaStream_t stream);

struct RelayRowsParams {
    NodeContext context;
    DispatchParams dispatch;  // as on one node; its blocks come behind those that send
    int num_send_blocks;      // 0 where it does not pull
};

struct RelaySumsParams {
    NodeContext context;
    Summed summed;
    int num_push_blocks, num_forward_blocks, num_home_blocks;
    layout::SliceLayout slices;
    layout::RingShape ring;  // of layout::kSumRings
};

struct GiveUpParams {
    NodeContext context;
    uint64_t reason;  // of errors.py
};

// The kernels that use a network, one set for each.
struct NetworkKernels {
    void (*spread_routing)(const SpreadRoutingParams& p, cudaStream_t stream);
    void (*relay_rows)(const RelayRowsParams& p, cudaStream_t stream);
    void (*relay_sums)(const RelaySumsParams& p, cudaStream_t stream);
    void (*give_up)(const GiveUpParams& p, cudaStream_t stream);
};

}  // namespace hybrid_ep::kernels
