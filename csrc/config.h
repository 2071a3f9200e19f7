// The settings of a runtime. Python gives them by name (bind_config); of what it gives beyond, such
// as fields of Config that the runtime does not need, nothing is read.
#pragma once

#include "network/context.h"

namespace hybrid_ep {

struct RuntimeConfig {
    int device, rank, num_ranks, num_experts, max_tokens, topk;
    int row_capacity, inbox_row_bytes;
    int num_sms_publish, num_sms_dispatch, num_sms_combine, slice_bytes;
    double timeout_s;    // may be infinite
    int64_t num_routes;  // made before, by a Buffer that was released
    int64_t layout_base;
    bool trace;
    // Of several nodes; for the kernels of one node, all ranks are of one.
    int num_nodes, ranks_per_node;
    int network_channels, network_chunk_tokens, network_window_chunks;
    bool uses_mapped = false;

    // `visit(name, field)` for each, and `visit(name, field, false)` where it may be left out.
    template <typename Visit>
    void each_field(Visit visit) {
        visit("device", device), visit("rank", rank), visit("num_ranks", num_ranks);
        visit("num_experts", num_experts), visit("max_tokens", max_tokens), visit("topk", topk);
        visit("row_capacity", row_capacity), visit("inbox_row_bytes", inbox_row_bytes);
        visit("num_sms_publish", num_sms_publish), visit("num_sms_dispatch", num_sms_dispatch);
        visit("num_sms_combine", num_sms_combine), visit("slice_bytes", slice_bytes);
        visit("timeout_s", timeout_s), visit("num_routes", num_routes);
        visit("layout_base", layout_base), visit("trace", trace);
        visit("num_nodes", num_nodes), visit("ranks_per_node", ranks_per_node);
        visit("network_channels", network_channels);
        visit("network_chunk_tokens", network_chunk_tokens);
        visit("network_window_chunks", network_window_chunks);
        visit("uses_mapped", uses_mapped, false);
    }
};

// What kernels know of a call, but for addresses: of one node, and of several.
inline NodesContext context_of(const RuntimeConfig& config, const layout::NodesLayout& nodes) {
    NodesContext c{};
    c.nodes = nodes;
    c.node = config.rank / nodes.ranks_per_node;
    c.local_rank = config.rank % nodes.ranks_per_node;
    c.num_routes = config.num_routes;
    c.uses_mapped = config.uses_mapped;
    c.world.rank = config.rank;
    c.world.first_peer = c.node * nodes.ranks_per_node;
    c.world.num_peers = nodes.ranks_per_node;
    c.world.buffer = nodes.buffer;
    c.world.handle = layout::HandleLayout::make(nodes.buffer);
    c.kept = layout::NodesHandleLayout::make(c.world.handle, nodes.num_nodes);
    return c;
}
inline NodesContext context_of_one_node(const RuntimeConfig& config) {
    layout::NodesLayout nodes{};  // without windows
    nodes.buffer =
        layout::BufferLayout::make(config.num_ranks, config.num_experts, config.max_tokens,
                                   config.topk, config.row_capacity, config.inbox_row_bytes);
    nodes.num_nodes = 1;
    nodes.ranks_per_node = config.num_ranks;
    nodes.total_bytes = nodes.buffer.total_bytes;
    NodesContext c = context_of(config, nodes);
    c.kept.num_words = c.world.handle.num_words;  // it keeps nothing beside the copies
    return c;
}
inline NodesContext context_of_several_nodes(const RuntimeConfig& config) {
    return context_of(config, layout::NodesLayout::make(
                                  config.num_nodes, config.ranks_per_node, config.num_experts,
                                  config.max_tokens, config.topk, config.row_capacity,
                                  config.inbox_row_bytes, config.network_chunk_tokens,
                                  config.network_channels * config.network_window_chunks));
}

}  // namespace hybrid_ep
