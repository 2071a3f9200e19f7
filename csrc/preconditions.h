// What the kernels rely on, asserted by the host before the first launch of a call, whichever way
// the call was reached. A broken rule becomes a ValueError in Python; nothing has been sent then.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "check.h"
#include "kernels/kernels.h"

namespace hybrid_ep {

[[noreturn]] inline void refuse(const char* what, const char* rule, int64_t limit, int64_t got) {
    throw std::invalid_argument(std::string(what) + " must be " + rule + " " +
                                std::to_string(limit) + ", got " + std::to_string(got));
}
inline void require_at_most(const char* what, int64_t got, int64_t most) {
    if (got > most) refuse(what, "at most", most, got);
}
inline void require_at_least(const char* what, int64_t got, int64_t least) {
    if (got < least) refuse(what, "at least", least, got);
}
inline void require_multiple(const char* what, int64_t got, int64_t unit) {
    if (got % unit != 0) refuse(what, "a multiple of", unit, got);
}
inline void require_aligned(const char* what, const void* at, int64_t unit) {
    require_multiple(what, int64_t(reinterpret_cast<uintptr_t>(at)), unit);
}

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // a row is numbered by an int32
// A term of a sum is found by a 32-bit number of 16 bytes each (SumJob::term).
constexpr int64_t kMostTermBytes = 16LL << 32;

inline void require_route(const layout::BufferLayout& b, const Choices& choices,
                          const NewLayout& layout) {
    require_at_most("tokens of topk_idx", choices.num_tokens, b.max_tokens);
    require_aligned("the address of topk_idx", choices.topk_idx, choices.idx_bytes);
    require_aligned("the address of the layout", layout.words, 16);
    require_at_least("align", choices.align, 1);
    // half of the rows that an int32 can number are tokens, half padding (shape.py, MAX_ROWS)
    require_at_most("align times the experts of a rank",
                    int64_t(choices.align) * b.num_local_experts, kMostRows / 2);
    require_at_most("max_rows", choices.max_rows, kMostRows);
    require_at_most("top-k slots of a token", choices.topk_slots, b.topk);
    require_aligned("the address of most", choices.most, 4);
    require_aligned("the address of the padded counts", layout.padded_counts, 8);
}

inline bool is_wide(const layout::RecordLayout& record, const Sent& sent) {
    return record.scale_bytes % 4 == 0 && sent.scales_stride % 4 == 0;
}

inline void require_dispatch(const kernels::DispatchParams& p) {
    const auto& b = p.context.buffer;
    const Sent& sent = p.sent;
    require_at_most("tokens of x", sent.num_tokens, b.max_tokens);
    require_at_least("bytes of a row", sent.row_bytes, 16);
    require_multiple("bytes of a row", sent.row_bytes, layout::kBulkAlign);
    require_multiple("the stride of x in bytes", sent.x_stride, layout::kBulkAlign);
    require_aligned("the address of x", sent.x, layout::kBulkAlign);
    require_aligned("the address of topk_weights", sent.weights, 4);
    if (is_wide(p.record, sent)) require_aligned("the address of scales", sent.scales, 4);
    require_aligned("the address of the layout", sent.words, 16);
    require_at_most("bytes of a row, its scales and weights", p.record.bytes(), b.record_bytes);
    // the storer frees a slot only when so many newer ones have been stored
    require_at_least("slots of the ring of dispatch", p.ring.num_slots, layout::kSlotsRead + 1);
}

inline void require_received(const kernels::DispatchParams& p, const Received& received) {
    require_at_most("rows of a dispatch", received.num_rows, kMostRows);
    require_aligned("the address of rows", received.rows, layout::kBulkAlign);
    require_aligned("the address of the rows' weights", received.weights, 4);
    require_aligned("the address of the rows' scales", received.scales,
                    p.record.scale_bytes % 16 == 0  ? 16
                    : p.record.scale_bytes % 4 == 0 ? 4
                                                    : 1);
}

// Nothing travels with the gradients: those of the weights are made of what the rank has.
inline void require_combine_backward(const kernels::CombineBackwardParams& p) {
    require_at_most("bytes beside a gradient", p.dispatch.record.trailer_bytes(), 0);
    require_aligned("the address of the experts' rows", p.weighted.rows, layout::kBulkAlign);
    require_aligned("the address of their weights", p.weighted.weights, 4);
    require_at_least("slots of the ring of a combine's backward", p.dispatch.ring.num_slots, 2);
}

inline void require_combine(const kernels::CombineParams& p, int inbox_row_bytes) {
    const Summed& summed = p.summed;
    require_at_most("tokens of y", summed.num_tokens, p.context.buffer.max_tokens);
    require_at_least("bytes of a row", summed.row_bytes, 16);
    require_multiple("bytes of a row", summed.row_bytes, layout::kBulkAlign);
    require_at_most("bytes of a row to be summed", summed.row_bytes, inbox_row_bytes);
    require_at_most("bytes of all rows", summed.num_rows * summed.row_bytes, kMostTermBytes);
    require_aligned("the address of rows", summed.rows, layout::kBulkAlign);
    require_aligned("the address of weights", summed.weights, 4);
    require_aligned("the address of values", summed.values, 4);
    require_aligned("the address of y", summed.y, 16);
    require_aligned("the address of the values at home", summed.home_values, 4);
    require_aligned("the address of the layout", summed.words, 16);
    require_at_least("slots of a ring of combine", p.ring.num_slots, 2);
}

// Once, when a runtime is made.
inline void require_shared_memory(int device) {
    require_at_least("bytes of shared memory of a block on this GPU",
                     shared_memory_per_block(device), layout::kBlockSmemBytes);
}

}  // namespace hybrid_ep
