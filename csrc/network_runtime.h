// The host side of several nodes: knows the sizes, launches the kernels. The symmetric memory is
// given to it, mapped; which network the kernels use is a set of launch functions.
//
// Python checks every tensor before it gets here and passes plain addresses. The verbs are those of
// Runtime (runtime.h), and only required_rows() and destroy() wait for the GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "call_state.h"
#include "kernels/internode.h"

namespace hybrid_ep {

struct NetworkConfig {
    int device, rank, num_nodes, ranks_per_node, num_experts, max_tokens, topk;
    int row_capacity, inbox_row_bytes;
    int chunk_tokens, window;  // tokens of a slot, slots to each rail peer
    int num_sms_publish, num_sms_dispatch, num_sms_combine, num_sms_send, slice_bytes;
    double timeout_s;
    bool trace;

    layout::RelayLayout layout() const {
        return layout::RelayLayout::make(num_nodes, ranks_per_node, num_experts, max_tokens, topk,
                                         row_capacity, inbox_row_bytes, chunk_tokens, window);
    }
};

class NetworkRuntime {
  public:
    NetworkRuntime(const NetworkConfig& config, const kernels::NetworkKernels& kernels);
    ~NetworkRuntime() { destroy(); }
    NetworkRuntime(const NetworkRuntime&) = delete;
    NetworkRuntime& operator=(const NetworkRuntime&) = delete;

    int64_t handle_words() const { return context_.kept.num_words; }
    int64_t symmetric_bytes() const { return context_.relay.total_bytes; }

    // Zeroes my part and takes the addresses of all of my node's, by local rank, and of my rail's,
    // by node (null where the network needs none). No rank may make a call before all are here.
    void attach(const std::vector<uintptr_t>& peers, const std::vector<uintptr_t>& rails);
    // Waits for this rank's kernels; the memory is free then. Idempotent.
    void destroy();

    uint64_t route(uintptr_t topk_idx, int idx_bytes, int64_t idx_stride, int num_tokens, int align,
                   int64_t max_rows, bool want_mail, uintptr_t words, uintptr_t counts,
                   uintptr_t offsets, uintptr_t required_rows, uintptr_t stream);

    // The two halves of a dispatch, and both. `pull` goes with the `publish` before.
    void publish(uintptr_t x, int64_t x_stride, int row_bytes, uintptr_t weights,
                 int64_t weights_stride, uintptr_t scales, int64_t scales_stride, int scale_bytes,
                 int num_tokens, uintptr_t words, uintptr_t stream);
    void pull(uintptr_t rows, uintptr_t row_weights, uintptr_t row_scales, int64_t num_rows,
              uintptr_t stream);
    void dispatch(uintptr_t x, int64_t x_stride, int row_bytes, uintptr_t weights,
                  int64_t weights_stride, uintptr_t scales, int64_t scales_stride, int scale_bytes,
                  int num_tokens, uintptr_t words, uintptr_t rows, uintptr_t row_weights,
                  uintptr_t row_scales, int64_t num_rows, uintptr_t stream);

    // A fresh dispatch whose `num_rows` bounds its rows: route, and both halves. `sizes` is one
    // tensor for counts, offsets and required_rows, which follow each other.
    void dispatch_fresh(uintptr_t topk_idx, int idx_bytes, int64_t idx_stride, int align,
                        uintptr_t sizes, uintptr_t x, int64_t x_stride, int row_bytes,
                        uintptr_t weights, int64_t weights_stride, uintptr_t scales,
                        int64_t scales_stride, int scale_bytes, int num_tokens, uintptr_t words,
                        uintptr_t rows, uintptr_t row_weights, uintptr_t row_scales,
                        int64_t num_rows, uintptr_t stream);

    void combine(uintptr_t rows, int type, int row_bytes, uintptr_t weights, uintptr_t values,
                 uintptr_t y, uintptr_t home_values, int num_tokens, uintptr_t words,
                 uintptr_t stream);

    std::optional<int64_t> required_rows(uint64_t ticket, uintptr_t stream) const;
    std::optional<FaultReport> fault() const;
    std::vector<TraceEvent> take_trace();

  private:
    NetworkConfig config_;
    kernels::NetworkKernels kernels_;
    kernels::NodeContext context_{};
    int routing_blocks_;
    kernels::FillOutboxParams fill_{};  // of the dispatch that has been published
    std::unique_ptr<CallState> calls_;
};

}  // namespace hybrid_ep
