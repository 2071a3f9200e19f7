// What kernels and host share besides the symmetric memory: call counters, faults, the offsets of
// rows on their way to the host, the trace.
#pragma once

#include <cuda_runtime.h>

#include <optional>
#include <vector>

#include "config.h"
#include "layout/runtime_state.h"

namespace hybrid_ep {

struct FaultReport {
    int kind, phase, peer, channel;
    uint64_t epoch, seen, mine;
};

class CallState {
  public:
    // Where timeout_s is infinite only the host can end a wait. Layouts are told apart from those
    // of before a release, by num_routes, and from those of other Buffers, by layout_base.
    explicit CallState(const RuntimeConfig& config);
    ~CallState() { destroy(); }
    CallState(const CallState&) = delete;
    CallState& operator=(const CallState&) = delete;

    // Idempotent. The GPU must have finished this rank's kernels.
    void destroy();

    // `calls` is what peers announce to this rank, in its symmetric memory.
    Watch watch(const void* calls) const;
    // So far, with those before; waits for the GPU.
    int64_t num_routes() const;
    const Trace& trace() const { return trace_; }

    // Where the next exact dispatch sends its offsets: the ticket tells it from others.
    uint64_t next_ticket() { return ++tickets_; }
    Mail* mail_of(uint64_t ticket) const {
        return reinterpret_cast<Mail*>(mail_ + ticket % kMails * mail_bytes());
    }

    // Blocks the host until the mail of `ticket`, sent on `stream`, is there: the offsets of the
    // rows, the last of which is their number. Nothing if a fault came first or the deadline
    // passed. Throws what CUDA says if the kernels failed. `is_interrupted` is asked now and then
    // whether to end the wait.
    std::optional<std::vector<int32_t>> await_offsets(uint64_t ticket, cudaStream_t stream,
                                                      bool (*is_interrupted)()) const;
    std::optional<FaultReport> fault() const;
    // What the kernels noted since the last time; waits for the GPU.
    std::vector<TraceEvent> take_trace();

  private:
    void make(const RuntimeConfig& config);
    size_t mail_bytes() const { return size_t(Mail::bytes(num_local_experts_)); }

    static constexpr int kMails = 256;

    double timeout_s_;
    int num_local_experts_;
    Trace trace_{};
    DeviceState* state_ = nullptr;  // device memory
    Fault* fault_ = nullptr;        // mapped host memory, with the mail behind it
    char* mail_ = nullptr;
    uint64_t tickets_ = 0;
};

}  // namespace hybrid_ep
