// The symmetric memory of a rank of several nodes, and what its handles keep beside the copies.
//
// The ranks with my local rank on the other nodes are my rail peers: only they and I use the
// network with each other. Tokens and sums pass through windows, whose slots hold a chunk of tokens
// each; a slot is used again when its readers are done, so the windows do not grow with T.
//
//   buffer         outbox, routing inbox and its flags, as of one node of all ranks
//   relay window  node, slot, token           records that a rail peer sent; my node pulls them
//   push window   slot, token, local rank     sums of my node's ranks for a rail peer, or for me
//   push values   slot, token, place          gradients of weights, beside them
//   outgoing      node, slot, token           sums over my node, on their way to the rail peer
//   home window   node, slot, token           sums of each other node for my tokens
//   slot flags    which slot is full, read or free
//   sum flags     node, token, local rank     which sums have been pushed; whose have come home
//   rail flags    which blocks of the rail peer have put their routing; whom it waited for in vain
//
// "node" is the rail peer's, and there is an entry for my own.
#pragma once

#include "layout/handle_layout.h"

namespace hybrid_ep::layout {

constexpr int kMaxChunkTokens = 32;               // of a slot: a lane per token
constexpr int kMaxNodeRanks = 32;                 // of a node among several: a bit per rank
constexpr int kRailFlags = 2 * kMaxChannels + 1;  // of a rail peer: two a block, and its verdict
constexpr int kOwnWindows = 4;  // times as many slots for sums that stay in the node

// What a flag says of a slot. There is one for each reader of kReads, for each owner of kPassedOn,
// else one.
enum class SlotFlag : int {
    kArrived = 0,   // relay window: by the rail peer, for its owner alone
    kReads = 1,     // relay window: counts the records that a reader of my node has read
    kCredit = 2,    // the rail peer's relay window is free again: by the rail peer
    kNothing = 3,   // home window: nothing comes from that node, by the rail peer
    kHomeFree = 4,  // the rail peer's home window is free again: by the rail peer
    kPassedOn = 5,  // relay window of a rank of my node: that it has arrived, by that rank
    kNumKinds = 6,
};

// Which use of which slot a chunk is. Uses count from 1 and go on from call to call.
struct SlotUse {
    int slot;
    uint64_t use;
};

// The same of the push window, which has parts for each rail peer and for me, one behind the other.
struct PushSlot {
    int index, window;  // slots of the part
    SlotUse at;         // within it
};

struct NodesLayout {
    BufferLayout buffer;
    int num_nodes, ranks_per_node;
    int chunk_tokens, num_chunks;  // of a call
    int window;                    // slots between two rail peers
    int own_window;                // slots for what stays in the node
    int push_row_bytes;            // of a sum, the widest
    int sum_record_bytes;          // a sum and the values that ride along
    int64_t relay_offset, push_offset, push_values_offset, outgoing_offset, home_offset;
    int64_t slots_offset, push_free_offset, pushed_offset, summed_offset, rails_offset, total_bytes;

    static NodesLayout make(int num_nodes, int ranks_per_node, int num_experts, int max_tokens,
                            int topk, int row_capacity, int sum_row_bytes, int chunk_tokens,
                            int window) {
        NodesLayout l{};
        l.buffer = BufferLayout::make(num_nodes * ranks_per_node, num_experts, max_tokens, topk,
                                      row_capacity, 0);
        l.num_nodes = num_nodes;
        l.ranks_per_node = ranks_per_node;
        l.chunk_tokens = chunk_tokens;
        l.num_chunks = ceil_div(max_tokens, chunk_tokens);
        // no more than a call fills: so a call's last chunk has seen the call before it read, which
        // across nodes is the invariant "half free"
        l.window = min_of(window, l.num_chunks);
        l.own_window = min_of(kOwnWindows * window, l.num_chunks);
        l.push_row_bytes = round_up(sum_row_bytes, kBulkAlign);
        l.sum_record_bytes = round_up(sum_row_bytes + round_up(topk * 4, kBulkAlign), 128);

        int64_t end = l.buffer.total_bytes;
        auto region = [&end](int64_t bytes) {
            int64_t begin = end;
            end = round_up<int64_t>(begin + bytes, 128);
            return begin;
        };
        const int64_t tokens = int64_t(num_nodes) * l.window * chunk_tokens;
        l.relay_offset = region(tokens * l.buffer.record_bytes);
        const int64_t pushed = int64_t(l.num_push_slots()) * chunk_tokens;
        l.push_offset = region(pushed * ranks_per_node * l.push_row_bytes);
        l.push_values_offset = region(pushed * topk * 4);
        l.outgoing_offset = region(tokens * l.sum_record_bytes);
        l.home_offset = region(tokens * l.sum_record_bytes);
        l.slots_offset = region(l.flag_of(SlotFlag::kNumKinds, 0, 0, 0));
        l.push_free_offset = region(int64_t(l.num_push_slots()) * 8);
        l.pushed_offset = region(int64_t(num_nodes) * max_tokens * ranks_per_node * 8);
        l.summed_offset = region(int64_t(num_nodes) * max_tokens * 8);
        l.rails_offset = region(int64_t(num_nodes) * kRailFlags * 8);
        l.total_bytes = end;
        return l;
    }

    HYBRID_EP_HD SlotUse slot_use(uint64_t call, int chunk) const {
        return use_of(call, chunk, window);
    }
    // For a token of the rail peer on `node`, among ranks of `my_node`.
    HYBRID_EP_HD PushSlot push_slot(int node, int my_node, uint64_t call, int chunk) const {
        const int others_before = (node - my_node + num_nodes - 1) % num_nodes;
        const int slots = node == my_node ? own_window : window;
        const SlotUse at = use_of(call, chunk, slots);
        return {others_before * window + at.slot, slots, at};
    }
    HYBRID_EP_HD int num_push_slots() const { return (num_nodes - 1) * window + own_window; }
    // The call in which a slot of so many was used for the `use`-th time; 0: never.
    HYBRID_EP_HD uint64_t call_of(const SlotUse& at, int slots) const {
        return at.use == 0 ? 0 : (at.use - 1) / uses_of_call(at.slot, slots) + 1;
    }

    // ---- rows: `token` is the index within the chunk

    HYBRID_EP_HD int64_t relay_record(int node, int slot, int token) const {
        return relay_offset + entry(node, slot, token) * buffer.record_bytes;
    }
    // A slot is where it is whatever the rows of a call: its neighbours may hold those of another.
    HYBRID_EP_HD int64_t pushed_sum(const PushSlot& slot, int token, int local_rank) const {
        return push_offset +
               ((int64_t(slot.index) * chunk_tokens + token) * ranks_per_node + local_rank) *
                   push_row_bytes;
    }
    HYBRID_EP_HD int64_t pushed_values(const PushSlot& slot, int token) const {
        return push_values_offset + (int64_t(slot.index) * chunk_tokens + token) * buffer.topk * 4;
    }
    HYBRID_EP_HD int64_t outgoing_sum(int node, int slot, int token) const {
        return outgoing_offset + entry(node, slot, token) * sum_record_bytes;
    }
    HYBRID_EP_HD int64_t home_sum(int node, int slot, int token) const {
        return home_offset + entry(node, slot, token) * sum_record_bytes;
    }

    // ---- flags

    HYBRID_EP_HD int64_t flag(SlotFlag kind, int node, int slot, int local_rank = 0) const {
        return slots_offset + flag_of(kind, node, slot, local_rank);
    }
    // Which use of the slot has ended: by its owner, pushers look at it.
    HYBRID_EP_HD int64_t push_free_flag(const PushSlot& slot) const {
        return push_free_offset + int64_t(slot.index) * 8;
    }
    // That a rank of my node has pushed its sum of a token of the rail peer.
    HYBRID_EP_HD int64_t pushed_flag(int node, int64_t token, int local_rank) const {
        return pushed_offset +
               ((node * int64_t(buffer.max_tokens) + token) * ranks_per_node + local_rank) * 8;
    }
    // That the sum of another node for my token has come.
    HYBRID_EP_HD int64_t summed_flag(int node, int64_t token) const {
        return summed_offset + (node * int64_t(buffer.max_tokens) + token) * 8;
    }
    // By a block of the rail peer's routing kernel, for every other call: those of two calls in
    // succession may be under way at once (invariant "one use under way").
    HYBRID_EP_HD int64_t route_flag(int node, int channel, uint64_t call) const {
        return rail_flag(node, int(call % 2) * kMaxChannels + channel);
    }
    // Whom the rail peer waited for in vain, once it has given up.
    HYBRID_EP_HD int64_t verdict_flag(int node) const { return rail_flag(node, kRailFlags - 1); }

  private:
    // Invariant "one use under way": the same chunk takes the same slot in every call. So when its
    // sums are put again, those of the call before have been added, and the flags of its tokens
    // never have two calls under way.
    HYBRID_EP_HD SlotUse use_of(uint64_t call, int chunk, int slots) const {
        const int slot = chunk % slots;
        return {slot, (call - 1) * uses_of_call(slot, slots) + chunk / slots + 1};
    }
    HYBRID_EP_HD uint64_t uses_of_call(int slot, int slots) const {
        return ceil_div(num_chunks - slot, slots);
    }
    HYBRID_EP_HD int64_t entry(int node, int slot, int token) const {
        return (int64_t(node) * window + slot) * chunk_tokens + token;
    }
    HYBRID_EP_HD int64_t rail_flag(int node, int nth) const {
        return rails_offset + (int64_t(node) * kRailFlags + nth) * 8;
    }
    HYBRID_EP_HD int64_t flag_of(SlotFlag kind, int node, int slot, int local_rank) const {
        return (((int64_t(kind) * num_nodes + node) * window + slot) * ranks_per_node +
                local_rank) *
               8;
    }
};

// Behind the handle of one node: where my tokens go, and who of my node has a copy of the tokens
// that my rail peers and I sent.
struct NodesHandleLayout {
    int max_tokens, topk;
    int64_t experts, readers, num_words;

    static NodesHandleLayout make(const HandleLayout& base, int num_nodes) {
        NodesHandleLayout l{};
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
