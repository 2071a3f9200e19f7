// Time stamps from inside the kernels, for those who ask for them (Config(trace=True)).
#pragma once

#include "device/ptx.cuh"
#include "runtime_state.h"

namespace hybrid_ep::device {

// What a block does from here on.
class Stopwatch {
  public:
    __device__ explicit Stopwatch(const Trace& trace)
        : trace_(trace), begin_(trace.events != nullptr ? ptx::global_timer_ns() : 0) {}

    // All threads may call it, the first of the block notes it.
    __device__ void stop(Span span, uint64_t epoch) const {
        if (threadIdx.x == 0) note(span, epoch);
    }
    // The calling thread notes it.
    __device__ void note(Span span, uint64_t epoch) const {
        if (trace_.events == nullptr) return;
        const uint32_t at = atomicAdd(trace_.count, 1u);
        if (at >= Trace::kCapacity) return;
        trace_.events[at] = {begin_, ptx::global_timer_ns(), uint32_t(epoch), uint16_t(blockIdx.x),
                             uint16_t(span)};
    }

  private:
    const Trace& trace_;
    uint64_t begin_;
};

}  // namespace hybrid_ep::device
