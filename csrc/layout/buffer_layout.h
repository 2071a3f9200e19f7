// The symmetric memory of a rank: where each region lies. Every rank has the same, so an offset
// and a peer's base address name an address in the peer's memory.
//
//   outbox          2 halves x max_tokens records  rows that peers pull (half = call & 1)
//   routing inbox   2 halves x source rank         each source's top-k and its counts per tile
//   inbox           max_tokens x most_others rows  sums of other ranks, in rank order
//   value inbox     max_tokens x topk floats       gradients of weights that come home
//   flags           phase x source rank x channel  what a peer's block has finished; in a dispatch,
//                                                  which parcel of tokens it published
//   calls           source rank x kCallWords       which verb the source makes (announcement.h)
//   sum flags       max_tokens x most_others       which rows of the inbox have come
#pragma once

#include "layout/announcement.h"

namespace hybrid_ep::layout {

enum class Phase : int { kRoute = 0, kDispatch = 1, kCombine = 2, kInboxFree = 3 };

struct BufferLayout {
    int num_ranks, num_experts, max_tokens, topk;
    int row_capacity;     // bytes of a token's row and scales
    int inbox_row_bytes;  // bytes of a row that comes home

    // derived, see make()
    int num_local_experts, num_tiles, num_parcels, record_bytes;
    int most_others;  // most other ranks that a token goes to; 0: sums come home another way
    int64_t experts_bytes, counts_bytes;  // of one source in the routing inbox
    int64_t outbox_offset, routing_offset, inbox_offset, values_offset, flags_offset, calls_offset,
        sum_flags_offset, total_bytes;

    static BufferLayout make(int num_ranks, int num_experts, int max_tokens, int topk,
                             int row_capacity, int inbox_row_bytes) {
        BufferLayout l{};
        l.num_ranks = num_ranks;
        l.num_experts = num_experts;
        l.max_tokens = max_tokens;
        l.topk = topk;
        l.row_capacity = row_capacity;
        l.inbox_row_bytes = inbox_row_bytes;
        l.num_local_experts = num_experts / num_ranks;
        l.num_tiles = ceil_div(max_tokens, kTileTokens);
        l.num_parcels = ceil_div(max_tokens, kParcelTokens);
        l.most_others = inbox_row_bytes > 0 ? min_of(topk, num_ranks - 1) : 0;
        l.record_bytes = round_up(row_capacity + round_up(topk * 4, kBulkAlign), 128);
        l.experts_bytes = round_up<int64_t>(int64_t(l.num_tiles) * kTileTokens * topk * 2, 128);
        l.counts_bytes =
            round_up<int64_t>(int64_t(l.num_tiles) * (l.num_local_experts + 1) * 2, 128);

        int64_t end = 0;
        auto region = [&end](int64_t bytes) {
            int64_t begin = end;
            end = round_up<int64_t>(begin + bytes, 128);
            return begin;
        };
        l.outbox_offset = region(2LL * max_tokens * l.record_bytes);
        l.routing_offset = region(2LL * num_ranks * (l.experts_bytes + l.counts_bytes));
        l.inbox_offset = region(int64_t(max_tokens) * l.most_others * inbox_row_bytes);
        l.values_offset = region(int64_t(max_tokens) * topk * 4);
        l.flags_offset = region(int64_t(num_ranks) * l.flags_of_source() * 8);
        l.calls_offset = region(int64_t(num_ranks) * kCallWords * 8);
        l.sum_flags_offset = region(int64_t(max_tokens) * l.most_others * 8);
        l.total_bytes = end;
        return l;
    }

    // The record of a token in the outbox of call `epoch`: its row, its scales, its weights. Calls
    // take the halves of outbox and routing inbox in turn: invariant "half free".
    HYBRID_EP_HD int64_t record(uint64_t epoch, int64_t token) const {
        return outbox_offset + (int64_t(epoch & 1) * max_tokens + token) * record_bytes;
    }
    // int16 [num_tiles * kTileTokens, topk]: each token's distinct experts, ascending, then -1.
    HYBRID_EP_HD int64_t experts_of(uint64_t epoch, int source) const {
        return routing_offset +
               (int64_t(epoch & 1) * num_ranks + source) * (experts_bytes + counts_bytes);
    }
    // uint16 [num_tiles, num_local_experts + 1]: rows for each expert of the reader, then copies.
    HYBRID_EP_HD int64_t counts_of(uint64_t epoch, int source) const {
        return experts_of(epoch, source) + experts_bytes;
    }
    HYBRID_EP_HD int64_t inbox_row(int64_t token, int other, int row_bytes) const {
        return inbox_offset + (token * most_others + other) * row_bytes;
    }
    // Set by the pusher of that row.
    HYBRID_EP_HD int64_t sum_flag(int64_t token, int other) const {
        return sum_flags_offset + (token * most_others + other) * 8;
    }
    HYBRID_EP_HD int64_t values_of(int64_t token) const { return values_offset + token * topk * 4; }
    HYBRID_EP_HD int64_t flags_of_source() const {
        return round_up<int64_t>(kMaxChannels + num_parcels + 1, 16);
    }
    HYBRID_EP_HD int64_t flag(Phase phase, int source, int channel) const {
        const int first = phase == Phase::kRoute      ? 0
                          : phase == Phase::kDispatch ? kMaxChannels
                                                      : kMaxChannels + num_parcels;  // inbox free
        return flags_offset + (source * flags_of_source() + first + channel) * 8;
    }
    // What `source` announces of a verb, and that it has given up.
    HYBRID_EP_HD int64_t announced(int source, uint32_t verb) const {
        return calls_offset + (int64_t(source) * kCallWords + verb % kAnnouncedVerbs) * 8;
    }
    HYBRID_EP_HD int64_t gave_up(int source) const {
        return calls_offset + (int64_t(source) * kCallWords + kGaveUpWord) * 8;
    }
};

}  // namespace hybrid_ep::layout
