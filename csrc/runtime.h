// The host side of the nvlink and nvshmem backends: knows the sizes, launches the kernels. One
// node, NVSHMEM and the loopback of tests are values of Target.
//
// Python checks every tensor before it gets here and passes plain addresses. Only
// await_offsets(), destroy() and what reads counters wait for the GPU.
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

// What a runtime is for.
struct Target {
    NodesContext (*context)(const RuntimeConfig& config);
    kernels::Launchers kernels;
    bool owns_memory;          // and maps it through CUDA IPC; else memory is given (attach)
    bool may_use_copy_engine;  // to publish rows
    int64_t most_bytes;        // of symmetric memory
};

class Runtime {
  public:
    Runtime(const RuntimeConfig& config, const Target& target);
    ~Runtime() { destroy(); }
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    const RuntimeConfig& config() const { return config_; }
    int64_t handle_words() const { return context_.kept.num_words; }
    int64_t symmetric_bytes() const { return context_.nodes.total_bytes; }

    // ---- memory, before the first call: its own, by handles in rank order
    std::string ipc_handle() { return memory_->handle(); }
    void open_peers(const std::vector<std::string>& handles);
    // or given: zeroes my part and takes those of my node, by local rank. No rank may make a call
    // before all are here.
    void attach(const std::vector<uintptr_t>& peers);
    // For tests: puts are posted to `queue`, whose `card` is kept while kernels may post.
    void post_puts(const PutQueue& queue, std::shared_ptr<void> card);

    // Waits for this rank's kernels and for no peer: own memory that peers may still map is kept
    // aside, given memory is free. Idempotent.
    void destroy();
    // The same where all ranks take part: first all unmap, then, after a barrier, all free.
    void unmap_peers();
    void free_now();

    // ---- the verbs

    // Publishes the routing and makes the handle. With `want_mail` the offsets of the rows are sent
    // to the host: returns the ticket for await_offsets(), else 0.
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
    // Of a weighted combine: a dispatch of gradients, in one launch.
    void combine_backward(const Sent& sent, const Received& received, const Weighted& weighted,
                          uintptr_t stream);

    // For the bench alone: moves the first half of an outbox (the peer's, or mine with `push`) to
    // the second half of the other rank's, with the ring of dispatch. Returns the number of bytes
    // moved, at most `num_bytes`. It overwrites the outbox: no rank may be in a call, before or
    // after.
    int64_t copy_peer(int peer, int64_t num_bytes, int num_sms, bool push, uintptr_t stream);

    // ---- around the verbs

    // Blocks the host until the mail of `ticket`, sent on `stream`, is there: the offsets of the
    // rows, the last of which is their number. Nothing if a fault came first or the deadline
    // passed. Throws what CUDA says if the kernels failed.
    std::optional<std::vector<int32_t>> await_offsets(uint64_t ticket, uintptr_t stream,
                                                      bool (*is_interrupted)()) const;
    std::optional<FaultReport> fault() const;
    // Tells the peers of my node and of my rail that this rank makes no more calls, for a reason of
    // errors.py. Does not wait for a kernel: it may be that no SM is free.
    void give_up(int reason);
    // So far, with those before the Buffer was released; waits for the GPU.
    int64_t num_routes() const;
    // What the kernels noted since the last time; waits for the GPU.
    std::vector<TraceEvent> take_trace();

  private:
    void take_addresses();
    void take_watch();
    void begin_dispatch(const Sent& sent);
    void publish_early(bool behind_routing, cudaStream_t stream);
    void publish_by_engine(cudaStream_t stream);
    int sms_of(int call, int config, int least) const;
    int sms_of_dispatch() const;
    void begin_pull(const Received& received);
    void end_dispatch(const Received& received, cudaStream_t stream);

    RuntimeConfig config_;
    kernels::Launchers kernels_;
    NodesContext context_;
    int routing_blocks_, most_blocks_;
    std::unique_ptr<memory::PeerMemory> memory_;  // null: it is given
    std::shared_ptr<CallState> calls_;    // also held by a wait for mail while it is destroyed
    std::unique_ptr<CopyEngine> engine_;  // null: SMs publish all rows
    std::shared_ptr<void> card_;          // for tests
    kernels::DispatchParams begun_{};     // the dispatch that is being made
    uint64_t num_dispatches_ = 0;         // as the GPU counts them, while no graph replays any
    bool is_half_made_ = false;
};

}  // namespace hybrid_ep
