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
#include "config.h"
#include "kernels/several_nodes.h"
#include "kernels/verbs.h"
#include "network/delaying_network_card.h"

namespace hybrid_ep {

class NodesRuntime {
  public:
    NodesRuntime(const NodesConfig& config, const kernels::several_nodes::Launchers& kernels);
    ~NodesRuntime() { destroy(); }
    NodesRuntime(const NodesRuntime&) = delete;
    NodesRuntime& operator=(const NodesRuntime&) = delete;

    int64_t handle_words() const { return context_.kept.num_words; }
    int64_t symmetric_bytes() const { return context_.nodes.total_bytes; }

    // Zeroes my part and takes the addresses of all of my node's, by local rank, and of my rail's,
    // by node (null where the network needs none). No rank may make a call before all are here.
    void attach(const std::vector<uintptr_t>& peers, const std::vector<uintptr_t>& rails);
    // Has the loopback's puts delayed by up to so many microseconds, and reordered; before attach.
    void delay_puts(int most_us);
    // Waits for this rank's kernels; the memory is free then. Idempotent.
    void destroy();

    uint64_t route(const Choices& choices, const NewLayout& layout, bool want_mail,
                   uintptr_t stream);
    void publish(const Sent& sent, uintptr_t stream);
    uint64_t publish_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                           uintptr_t stream);
    void pull(const Received& received, uintptr_t stream);
    bool is_half_made() const { return is_half_made_; }
    void dispatch(const Sent& sent, const Received& received, uintptr_t stream);
    void dispatch_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                        const Received& received, uintptr_t stream);
    void combine(const Summed& summed, uintptr_t stream);

    std::optional<int64_t> required_rows(uint64_t ticket, uintptr_t stream,
                                         bool (*is_interrupted)()) const;
    std::optional<FaultReport> fault() const;
    // Tells the peers of my node and of my rail that this rank makes no more calls, for a reason of
    // errors.py. Does not wait: it may be that no SM is free.
    void give_up(int reason);
    // So far, with those before the Buffer was released; waits for the GPU.
    int64_t num_routes() const;
    std::vector<TraceEvent> take_trace();

  private:
    void begin_dispatch(const Sent& sent);
    void publish_early(uintptr_t stream);
    void end_dispatch(const Received& received, uintptr_t stream);

    NodesConfig config_;
    kernels::several_nodes::Launchers kernels_;
    NodesContext context_{};
    std::unique_ptr<DelayingNetworkCard> card_;  // for tests
    int routing_blocks_, num_send_blocks_;
    kernels::several_nodes::DispatchParams dispatch_{};  // of the dispatch that has begun
    bool is_half_made_ = false;
    std::shared_ptr<CallState> calls_;  // also of who waits for mail while it is destroyed
};

}  // namespace hybrid_ep
