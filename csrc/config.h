// The settings of a runtime. Python gives all of them by name (bind_config); of what it gives
// beyond, such as fields of Config that the runtime does not need, nothing is read.
#pragma once

#include "layout/nodes_layout.h"

namespace hybrid_ep {

struct RuntimeConfig {
    int device, rank, num_ranks, num_experts, max_tokens, topk;
    int row_capacity, inbox_row_bytes;
    int num_sms_publish, num_sms_dispatch, num_sms_combine, slice_bytes;
    double timeout_s;    // may be infinite
    int64_t num_routes;  // made before, by a Buffer that was released
    int64_t layout_base;
    bool trace;

    // `visit(name, field)` for each.
    template <typename Visit>
    void each_field(Visit visit) {
        visit("device", device), visit("rank", rank), visit("num_ranks", num_ranks);
        visit("num_experts", num_experts), visit("max_tokens", max_tokens), visit("topk", topk);
        visit("row_capacity", row_capacity), visit("inbox_row_bytes", inbox_row_bytes);
        visit("num_sms_publish", num_sms_publish), visit("num_sms_dispatch", num_sms_dispatch);
        visit("num_sms_combine", num_sms_combine), visit("slice_bytes", slice_bytes);
        visit("timeout_s", timeout_s), visit("num_routes", num_routes);
        visit("layout_base", layout_base), visit("trace", trace);
    }
};

// Of several nodes.
struct NodesConfig : RuntimeConfig {
    int num_nodes, ranks_per_node;
    int network_channels, network_chunk_tokens, network_window_chunks;
    bool uses_mapped;

    template <typename Visit>
    void each_field(Visit visit) {
        RuntimeConfig::each_field(visit);
        visit("num_nodes", num_nodes), visit("ranks_per_node", ranks_per_node);
        visit("network_channels", network_channels);
        visit("network_chunk_tokens", network_chunk_tokens);
        visit("network_window_chunks", network_window_chunks), visit("uses_mapped", uses_mapped);
    }

    layout::NodesLayout layout() const {
        return layout::NodesLayout::make(num_nodes, ranks_per_node, num_experts, max_tokens, topk,
                                         row_capacity, inbox_row_bytes, network_chunk_tokens,
                                         network_channels * network_window_chunks);
    }
};

}  // namespace hybrid_ep
