// What kernels and host share besides the symmetric memory: call counters, faults, the number of
// rows on its way to the host, the trace.
#pragma once

#include <cuda_runtime.h>

#include <optional>
#include <vector>

#include "runtime_state.h"

namespace hybrid_ep {

struct FaultReport {
    int kind, phase, peer, channel;
    uint64_t epoch, seen;
};

class CallState {
  public:
    CallState(double timeout_s, bool trace);
    ~CallState() { destroy(); }
    CallState(const CallState&) = delete;
    CallState& operator=(const CallState&) = delete;

    // Idempotent. The GPU must have finished this rank's kernels.
    void destroy();

    Watch watch() const { return {state_, fault_, uint64_t(timeout_s_ * 1e9)}; }
    const Trace& trace() const { return trace_; }

    // Where the next exact dispatch sends its number of rows: the ticket tells it from others.
    uint64_t next_ticket() { return ++tickets_; }
    Mail* mail_of(uint64_t ticket) const { return &mail_[ticket % kMailSlots]; }

    // Blocks the host until the mail of `ticket`, sent on `stream`, is there; nothing if a fault
    // came first or the deadline passed. Throws what CUDA says if the kernels failed.
    std::optional<int64_t> required_rows(uint64_t ticket, cudaStream_t stream) const;
    std::optional<FaultReport> fault() const;
    // What the kernels noted since the last time; waits for the GPU.
    std::vector<TraceEvent> take_trace();

  private:
    static constexpr int kMailSlots = 256;

    double timeout_s_;
    Trace trace_{};
    DeviceState* state_ = nullptr;  // device memory
    Fault* fault_ = nullptr;        // mapped host memory, with the mail behind it
    Mail* mail_ = nullptr;
    uint64_t tickets_ = 0;
};

}  // namespace hybrid_ep
