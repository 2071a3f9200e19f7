// Publishing by the GPU's copy engine, which takes no SM: what few SMs can send is what bounds a
// dispatch. It copies rows on a stream of its own, in steps, and raises a flag behind each.
#pragma once

#include <cuda_runtime.h>

#include "kernels/kernels.h"

namespace hybrid_ep {

// So many tokens of a dispatch, from the first on, SMs publish; the copy engine publishes the
// others. It does where few SMs dispatch many tokens: more SMs are faster by themselves, since they
// write no more than is soon read, so that it stays in the L2 cache. Nor does it where the host
// waits for the number of rows: there the time to tell it what to do is lost.
constexpr int tokens_by_sms(int num_sms, int num_tokens) {
    if (num_sms > 32 || num_tokens < 2048) return num_tokens;
    return num_sms > 16 ? 512 : 0;  // so peers can pull sooner
}

class CopyEngine {
  public:
    explicit CopyEngine(int device);  // which is the current one
    ~CopyEngine() { destroy(); }
    CopyEngine(const CopyEngine&) = delete;
    CopyEngine& operator=(const CopyEngine&) = delete;

    // Publishes what SMs do not, of a dispatch in one launch on `num_sms`, once the work that is on
    // `stream` by now is done, and says so in `p`. `call` is its number as the GPU counts.
    void publish(kernels::DispatchParams& p, int num_sms, uint64_t call, cudaStream_t stream);

  private:
    void destroy();
    bool can_publish(const kernels::DispatchParams& p, cudaStream_t stream);

    bool can_raise_flags_;
    bool was_captured_ = false;  // a dispatch is part of a graph
    cudaStream_t own_ = nullptr;
    cudaEvent_t before_ = nullptr;
};

}  // namespace hybrid_ep
