// The layout of one dispatch, an int32 tensor that the handle owns: who is pulled into which rows,
// and how a token's results come home.
#pragma once

#include "layout/buffer_layout.h"

namespace hybrid_ep::layout {

// A token of a source rank that this rank pulls. Its local experts are a run of the token's
// distinct experts (these are sorted), so its rows ascend and dropped ones are the last.
struct alignas(16) Copy {
    int32_t token;
    int32_t first_row;      // index into rows[]
    int16_t num_places;     // local experts of the token
    int16_t num_rows;       // of these, the ones whose row was not dropped
    uint8_t first_place;    // of my first expert among the token's distinct experts
    uint8_t others_before;  // ranks of the token before mine, its home left out
    uint16_t unused;
};
static_assert(sizeof(Copy) == 16, "a copy is one 16-byte load");

struct HandleLayout {
    int num_ranks, num_local_experts, max_tokens, topk, most_others;
    // first word of each section
    int64_t source_first, counts, offsets, copies, rows, own_copies, others, num_others, places,
        num_words;

    enum Header {
        kNumTokens = 0,
        kNumCopies = 1,
        kRequiredRows = 2,
        kMayHavePadding = 3,  // rows that belong to no token are possible
        kRouteNumber = 4,     // of the route that made it, among all routes of the Buffer
        kRouteVerb = 5,       // and among all verbs
        kHeaderWords = 16
    };

    static HandleLayout make(const BufferLayout& b) {
        HandleLayout l{};
        l.num_ranks = b.num_ranks;
        l.num_local_experts = b.num_local_experts;
        l.max_tokens = b.max_tokens;
        l.topk = b.topk;
        l.most_others = b.most_others;
        int64_t end = kHeaderWords;
        auto section = [&end](int64_t words) {
            int64_t begin = end;
            end = round_up<int64_t>(begin + words, 4);
            return begin;
        };
        int64_t most_copies = int64_t(b.num_ranks) * b.max_tokens;
        l.source_first = section(b.num_ranks + 1);
        l.counts = section(b.num_local_experts);
        l.offsets = section(b.num_local_experts + 1);
        l.copies = section(most_copies * 4);
        l.rows = section(most_copies * min_of(b.topk, b.num_local_experts));
        l.own_copies = section(b.max_tokens);
        l.others = section(ceil_div<int64_t>(int64_t(b.max_tokens) * b.most_others, 2));
        l.num_others = section(ceil_div(b.max_tokens, 4));
        l.places = section(ceil_div<int64_t>(int64_t(b.max_tokens) * b.topk, 4));
        l.num_words = end;
        return l;
    }
};

// The sections of a handle by name. `copies` of source s are those from source_first[s] on.
struct HandleView {
    int32_t* header;
    int32_t* source_first;  // [num_ranks + 1]
    int32_t* counts;        // [num_local_experts]
    int32_t* offsets;       // [num_local_experts + 1]
    Copy* copies;           // ordered by (source rank, token)
    int32_t* rows;          // row of the output for each local expert of each copy
    int32_t* own_copies;    // [T] which copy is my own token's, or -1
    int16_t* others;        // [T, most_others] the other ranks that my token goes to, ascending
    uint8_t* num_others;    // [T]
    int8_t* places;         // [T, topk] top-k slot -> place of its expert, or -1

    HYBRID_EP_HD HandleView(int32_t* words, const HandleLayout& l)
        : header(words),
          source_first(words + l.source_first),
          counts(words + l.counts),
          offsets(words + l.offsets),
          copies(reinterpret_cast<Copy*>(words + l.copies)),
          rows(words + l.rows),
          own_copies(words + l.own_copies),
          others(reinterpret_cast<int16_t*>(words + l.others)),
          num_others(reinterpret_cast<uint8_t*>(words + l.num_others)),
          places(reinterpret_cast<int8_t*>(words + l.places)) {}
};

}  // namespace hybrid_ep::layout
