// Time stamps from inside the kernels, for those who ask for them (Config(trace=True)).
#pragma once

#include "device/ptx.cuh"
#include "layout/runtime_state.h"

namespace hybrid_ep::device {

__device__ inline void note(const Trace& trace, Span span, uint64_t epoch, uint64_t begin_ns,
                            uint64_t end_ns) {
    if (trace.events == nullptr) return;
    const uint32_t at = atomicAdd(trace.count, 1u);
    if (at >= Trace::kCapacity) return;
    trace.events[at] = {begin_ns,        end_ns,
                        uint32_t(epoch), uint16_t(blockIdx.x),
                        uint16_t(span),  uint16_t(ptx::sm_id())};
}

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
        if (trace_.events != nullptr) {
            device::note(trace_, span, epoch, begin_, ptx::global_timer_ns());
        }
    }

  private:
    const Trace& trace_;
    uint64_t begin_;
};

}  // namespace hybrid_ep::device
