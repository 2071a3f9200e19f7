// What the host runtime of several nodes launches. Parameters travel by value.
#pragma once

#include "kernels/kernels.h"
#include "layout/relay_layout.h"
#include "layout/warp_ring_shape.h"

namespace hybrid_ep::kernels {

// What every kernel of several nodes knows.
struct NodeContext {
    Context world;  // of its peers mine alone is set
    Peers peers;    // of my node, by local rank
    Peers rails;    // of all nodes, for a network of plain stores (device/loopback_network.cuh)
    int node, local_rank;
    layout::RelayLayout relay;
    layout::RelayHandleLayout kept;

    HYBRID_EP_HD int rank_of(int of_node, int of_local_rank) const {
        return of_node * relay.ranks_per_node + of_local_rank;
    }
    HYBRID_EP_HD int rail_peer(int of_node) const { return rank_of(of_node, local_rank); }
    HYBRID_EP_HD char* mine() const { return peers.base[local_rank]; }
    HYBRID_EP_HD char* at(int64_t offset) const { return mine() + offset; }
    HYBRID_EP_HD uint64_t* flag_at(int64_t offset) const {
        return reinterpret_cast<uint64_t*>(at(offset));
    }
    HYBRID_EP_HD uint64_t* peer_flag(int of_local_rank, int64_t offset) const {
        return reinterpret_cast<uint64_t*>(peers.base[of_local_rank] + offset);
    }
};

struct SpreadRoutingParams {
    NodeContext context;
    const void* topk_idx;
    int idx_bytes;
    int64_t idx_stride;
    int num_tokens, num_blocks;
    int32_t* words;
};

// After assign_rows of the same call: what later calls with this handle must know of the routing.
struct KeepRoutingParams {
    NodeContext context;
    int32_t* words;
};
void launch_keep_routing(const KeepRoutingParams& p, cudaStream_t stream);

struct FillOutboxParams {
    NodeContext context;
    layout::RecordLayout record;
    Tokens tokens;
    int num_blocks;
    layout::SliceLayout slices;
    layout::WarpRingShape ring;
    int32_t* words;
};
void launch_fill_outbox(const FillOutboxParams& p, cudaStream_t stream);

struct RelayRowsParams {
    NodeContext context;
    layout::RecordLayout record;
    ExpertRows rows;
    int num_fill_blocks, num_send_blocks, num_pull_blocks;
    layout::SliceLayout slices;
    layout::WarpRingShape ring;
    int32_t* words;
};

struct RelaySumsParams {
    NodeContext context;
    CombineIo io;
    int num_push_blocks, num_forward_blocks, num_home_blocks;
    layout::WarpRingShape ring;
    int32_t* words;
};

// The kernels that use a network, one set for each.
struct NetworkKernels {
    void (*spread_routing)(const SpreadRoutingParams& p, cudaStream_t stream);
    void (*relay_rows)(const RelayRowsParams& p, cudaStream_t stream);
    void (*relay_sums)(const RelaySumsParams& p, cudaStream_t stream);
};

}  // namespace hybrid_ep::kernels
