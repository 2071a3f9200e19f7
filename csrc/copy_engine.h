// Publishing by the GPU's copy engine, which takes no SM: what few SMs can send is what bounds a
// dispatch. It copies rows on a stream of its own, in steps, and raises a flag behind each.
#pragma once

#include <cuda_runtime.h>

#include "kernels/kernels.h"

namespace hybrid_ep {

class CopyEngine {
  public:
    explicit CopyEngine(int device);  // which is the current one
    ~CopyEngine() { destroy(); }
    CopyEngine(const CopyEngine&) = delete;
    CopyEngine& operator=(const CopyEngine&) = delete;

    // Rows in memory, so many bytes apart.
    template <typename Byte>
    struct Rows {
        Byte* at;
        int64_t stride;
    };
    // Whether it can read such rows. Never where the driver cannot raise flags between the copies
    // of a stream, as on some virtual GPUs.
    bool can_copy(int64_t stride, int row_bytes) const;

    // Copies rows [begin, end) once the work that is on `stream` by now is done; flags[i] becomes
    // `flag` behind step i. Behind the last one `from` is not read any more.
    kernels::CopySteps copy(const Rows<const char>& from, const Rows<char>& to, int row_bytes,
                            int begin, int end, uint64_t* flags, uint64_t flag,
                            cudaStream_t stream);

  private:
    void destroy();

    bool can_raise_flags_;
    cudaStream_t own_ = nullptr;
    cudaEvent_t before_ = nullptr;
};

}  // namespace hybrid_ep
