// What a kernel of several nodes knows beyond a Context, and what it asks of a network.
#pragma once

#include "layout/context.h"
#include "layout/nodes_layout.h"
#include "network/put_queue.h"

namespace hybrid_ep {

// What a put does to a flag of the peer once its bytes are there. Puts are not ordered among each
// other: a wait for several of them is for a flag that each adds to.
struct Signal {
    uint64_t* flag;  // named by its address in my memory
    uint64_t value;
    bool adds;  // to the flag; else sets it
};

// What every kernel of several nodes knows.
struct NodesContext {
    Context world;  // of all ranks; its peers are those of my node
    // For a network without cards (loopback_network.cuh): all nodes of my rail, and where puts are
    // posted if they are delayed.
    Peers rails;
    PutQueue queue;
    int node, local_rank;
    uint64_t num_routes;  // made before the memory was zeroed
    bool uses_mapped;     // a rail peer's memory is used where it is mapped; else all is put
    layout::NodesLayout nodes;
    layout::NodesHandleLayout kept;

    HYBRID_EP_HD int rank_of(int of_node, int of_local_rank) const {
        return of_node * nodes.ranks_per_node + of_local_rank;
    }
    HYBRID_EP_HD layout::PushSlot push_slot(int of_node, uint64_t call, int chunk) const {
        return nodes.push_slot(of_node, node, call, chunk);
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

}  // namespace hybrid_ep
