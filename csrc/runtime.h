// The host side of the nvlink backend: owns the memory, knows the sizes, launches the kernels.
//
// Python checks every tensor before it gets here and passes plain addresses. Only
// required_rows() and destroy() wait for the GPU.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "call_state.h"
#include "config.h"
#include "copy_engine.h"
#include "kernels/kernels.h"
#include "kernels/verbs.h"
#include "memory/peer_memory.h"

namespace hybrid_ep {

// So many tokens of a dispatch, from the first on, SMs publish; the copy engine publishes the
// others. It does where few SMs dispatch many tokens: more SMs are faster by themselves, since they
// write no more than is soon read, so that it stays in the L2 cache. Nor does it where the host
// waits for the number of rows: there the time to tell it what to do is lost.
constexpr int tokens_by_sms(int num_sms, int num_tokens) {
    if (num_sms > 32 || num_tokens < 2048) return num_tokens;
    return num_sms > 16 ? 512 : 0;  // so peers can pull sooner
}

class Runtime {
  public:
    explicit Runtime(const RuntimeConfig& config);
    ~Runtime();
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    std::string ipc_handle() { return memory_->handle(); }
    void open_peers(const std::vector<std::string>& handles) { memory_->open(handles); }
    // Waits for no peer; what peers may still map is kept aside. Idempotent.
    void destroy();
    // The same where all ranks take part: first all unmap, then, after a barrier, all free.
    void unmap_peers();
    void free_now();

    int64_t handle_words() const { return handle_.num_words; }
    int64_t symmetric_bytes() const { return buffer_.total_bytes; }

    // Publishes the routing and makes the handle. With `want_mail` the number of rows is sent to
    // the host: returns the ticket for required_rows(), else 0.
    uint64_t route(const Choices& choices, const NewLayout& layout, bool want_mail,
                   uintptr_t stream);

    // A dispatch, in one launch or in two: `publish` begins it, `pull` goes with the `publish`
    // before. `publish_fresh` is route, with mail, and publish.
    void publish(const Sent& sent, uintptr_t stream);
    uint64_t publish_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                           uintptr_t stream);
    void pull(const Received& received, uintptr_t stream);
    // `publish` or `publish_fresh` has begun, and `pull` has not.
    bool is_half_made() const { return is_half_made_; }
    void dispatch(const Sent& sent, const Received& received, uintptr_t stream);

    // A fresh dispatch whose rows are bounded: route and dispatch.
    void dispatch_fresh(const Choices& choices, const NewLayout& layout, const Sent& sent,
                        const Received& received, uintptr_t stream);

    void combine(const Summed& summed, uintptr_t stream);

    // For the bench alone: moves the first half of an outbox (the peer's, or mine with `push`) to
    // the second half of the other rank's, with the ring of dispatch. Returns the number of bytes
    // moved, at most `num_bytes`. It overwrites the outbox: no rank may be in a call, before or
    // after.
    int64_t copy_peer(int peer, int64_t num_bytes, int num_sms, bool push, uintptr_t stream);

    // Blocks the host until the mail of `ticket`, sent on `stream`, is there; nothing if a fault
    // came first or the deadline passed. Throws what CUDA says if the kernels failed.
    std::optional<int64_t> required_rows(uint64_t ticket, uintptr_t stream,
                                         bool (*is_interrupted)()) const;
    std::optional<FaultReport> fault() const;
    // Tells the peers that this rank makes no more calls, for a reason of errors.py.
    void give_up(int reason);
    // So far, with those before the Buffer was released; waits for the GPU.
    int64_t num_routes() const;
    // What the kernels noted since the last time; waits for the GPU.
    std::vector<TraceEvent> take_trace();

  private:
    Context context() const;
    bool engine_can_publish(const Sent& sent, cudaStream_t stream);
    void copy_by_engine(const Sent& sent, cudaStream_t stream);
    void begin_dispatch(const Sent& sent);
    void publish_early(bool behind_routing, cudaStream_t stream);
    void end_dispatch(const Received& received, cudaStream_t stream);

    RuntimeConfig config_;
    layout::BufferLayout buffer_;
    layout::HandleLayout handle_;
    int routing_blocks_;
    std::unique_ptr<memory::PeerMemory> memory_;
    std::shared_ptr<CallState> calls_;  // also of who waits for mail while it is destroyed
    std::unique_ptr<CopyEngine> engine_;
    uint64_t num_dispatches_ = 0;  // as the GPU counts them, while no graph replays any
    bool was_captured_ = false;    // a dispatch is part of a graph
    bool is_half_made_ = false;
    kernels::DispatchParams dispatch_{};  // of the call that is being made
};

}  // namespace hybrid_ep
