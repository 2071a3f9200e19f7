// The symmetric memory of a rank of several nodes, and what its handles keep beside the copies.
//
// The ranks with my local rank on the other nodes are my rail peers: only they and I use the
// network with each other. Tokens and sums pass through windows, whose slots hold a chunk of tokens
// each; a slot is used again when its readers are done, so the windows do not grow with T.
//
//   world         outbox, routing inbox and its flags, as of one node of all ranks
//   relay window  node, slot, token           records that a rail peer sent; my node pulls them
//   push window   node, slot, token, local rank   sums of my node's ranks for that node's rail peer
//   push values   node, slot, token, place    gradients of weights, beside them
//   outgoing      node, slot, token           sums over my node, on their way to the rail peer
//   home window   node, slot, token           sums of each node for my tokens
//   flags         which slot is full or free; which block has published
//
// "node" is the rail peer's in all of them, and there is an entry for my own.
#pragma once

#include "layout/handle_layout.h"

namespace hybrid_ep::layout {

constexpr int kMaxChunkTokens = 32;  // of a slot: a lane per token
constexpr int kMaxNodeRanks = 32;    // of a node among several: a bit per rank

// What a flag says of a slot. Those named after a rank are written by it, one for each.
enum class Slot : int {
    kArrived = 0,    // relay window: by the rail peer
    kConsumed = 1,   // relay window: by a reader of my node
    kCredit = 2,     // the rail peer's relay window: by the rail peer
    kPushed = 3,     // push window: by a rank of my node
    kForwarded = 4,  // push window: free again, by myself, pushers look at it
    kSummed = 5,     // home window: by the rail peer
    kHomeFree = 6,   // the rail peer's home window: by the rail peer
    kNumKinds = 7,
};

// Which use of which slot a chunk is. Uses count from 1 and go on from call to call.
struct Turn {
    int slot;
    uint64_t use;
};

struct RelayLayout {
    BufferLayout world;
    int num_nodes, ranks_per_node;
    int chunk_tokens, num_chunks;  // of a call
    int window;                    // slots between two rail peers
    int sum_record_bytes;          // a sum and the values that ride along
    int64_t relay_offset, push_offset, push_values_offset, outgoing_offset, home_offset;
    int64_t slots_offset, channels_offset, total_bytes;

    static RelayLayout make(int num_nodes, int ranks_per_node, int num_experts, int max_tokens,
                            int topk, int row_capacity, int sum_row_bytes, int chunk_tokens,
                            int window) {
        RelayLayout l{};
        l.world = BufferLayout::make(num_nodes * ranks_per_node, num_experts, max_tokens, topk,
                                     row_capacity, 0);
        l.num_nodes = num_nodes;
        l.ranks_per_node = ranks_per_node;
        l.chunk_tokens = chunk_tokens;
        l.num_chunks = ceil_div(max_tokens, chunk_tokens);
        // no more than a call fills: so a call's last chunk has seen the call before it consumed
        l.window = min_of(window, l.num_chunks);
        l.sum_record_bytes = round_up(sum_row_bytes + round_up(topk * 4, kBulkAlign), 128);

        int64_t end = l.world.total_bytes;
        auto region = [&end](int64_t bytes) {
            int64_t begin = end;
            end = round_up<int64_t>(begin + bytes, 128);
            return begin;
        };
        const int64_t tokens = int64_t(num_nodes) * l.window * chunk_tokens;
        l.relay_offset = region(tokens * l.world.record_bytes);
        l.push_offset = region(tokens * ranks_per_node * round_up(sum_row_bytes, kBulkAlign));
        l.push_values_offset = region(tokens * topk * 4);
        l.outgoing_offset = region(tokens * l.sum_record_bytes);
        l.home_offset = region(tokens * l.sum_record_bytes);
        l.slots_offset = region(l.flag_of(Slot::kNumKinds, 0, 0, 0));
        l.channels_offset = region(int64_t(num_nodes + ranks_per_node) * kMaxChannels * 8);
        l.total_bytes = end;
        return l;
    }

    HYBRID_EP_HD Turn turn(uint64_t call, int chunk) const {
        const uint64_t count = (call - 1) * num_chunks + chunk;
        return {int(count % window), count / window + 1};
    }
    // The call in which a slot was used for the `use`-th time; 0: never.
    HYBRID_EP_HD uint64_t call_of(const Turn& turn) const {
        return turn.use == 0 ? 0 : ((turn.use - 1) * window + turn.slot) / num_chunks + 1;
    }

    // ---- rows: `token` is the place within the chunk

    HYBRID_EP_HD int64_t relay_record(int node, int slot, int token) const {
        return relay_offset + entry(node, slot, token) * world.record_bytes;
    }
    HYBRID_EP_HD int64_t pushed_sum(int node, int slot, int token, int local_rank,
                                    int row_bytes) const {
        return push_offset + (entry(node, slot, token) * ranks_per_node + local_rank) * row_bytes;
    }
    HYBRID_EP_HD int64_t pushed_values(int node, int slot, int token) const {
        return push_values_offset + entry(node, slot, token) * world.topk * 4;
    }
    HYBRID_EP_HD int64_t outgoing_sum(int node, int slot, int token) const {
        return outgoing_offset + entry(node, slot, token) * sum_record_bytes;
    }
    HYBRID_EP_HD int64_t home_sum(int node, int slot, int token) const {
        return home_offset + entry(node, slot, token) * sum_record_bytes;
    }

    // ---- flags

    HYBRID_EP_HD int64_t flag(Slot kind, int node, int slot, int local_rank = 0) const {
        return slots_offset + flag_of(kind, node, slot, local_rank);
    }
    // By a block of the rail peer's routing kernel.
    HYBRID_EP_HD int64_t route_flag(int node, int channel) const {
        return channels_offset + (int64_t(node) * kMaxChannels + channel) * 8;
    }
    // By a block of a local peer that publishes its tokens.
    HYBRID_EP_HD int64_t published_flag(int local_rank, int channel) const {
        return route_flag(num_nodes + local_rank, channel);
    }

  private:
    HYBRID_EP_HD int64_t entry(int node, int slot, int token) const {
        return (int64_t(node) * window + slot) * chunk_tokens + token;
    }
    HYBRID_EP_HD int64_t flag_of(Slot kind, int node, int slot, int local_rank) const {
        return (((int64_t(kind) * num_nodes + node) * window + slot) * ranks_per_node +
                local_rank) *
               8;
    }
};

// Behind the handle of one node: where my tokens go, and who of my node has a copy of the tokens
// that my rail peers and I sent.
struct RelayHandleLayout {
    int max_tokens, topk;
    int64_t experts, readers, num_words;

    static RelayHandleLayout make(const HandleLayout& base, int num_nodes) {
        RelayHandleLayout l{};
        l.max_tokens = base.max_tokens;
        l.topk = base.topk;
        l.experts = base.num_words;
        l.readers = round_up<int64_t>(
            l.experts + ceil_div<int64_t>(int64_t(base.max_tokens) * base.topk, 2), 4);
        l.num_words = round_up<int64_t>(l.readers + int64_t(num_nodes) * base.max_tokens, 4);
        return l;
    }

    // int16 [max_tokens, topk]: the distinct experts of my tokens, ascending, then -1.
    HYBRID_EP_HD int16_t* experts_of(int32_t* words, int64_t token) const {
        return reinterpret_cast<int16_t*>(words + experts) + token * topk;
    }
    // uint32 [num_nodes, max_tokens]: a bit for each local rank that has a copy of the rail peer's
    // token.
    HYBRID_EP_HD uint32_t* readers_of(int32_t* words, int node) const {
        return reinterpret_cast<uint32_t*>(words + readers) + int64_t(node) * max_tokens;
    }
};

}  // namespace hybrid_ep::layout
