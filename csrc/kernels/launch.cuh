// The one place where a kernel is launched.
#pragma once

#include "check.h"

namespace hybrid_ep::kernels {

template <typename Params>
void launch(void (*kernel)(Params), const Params& p, int blocks, int threads, int smem_bytes,
            cudaStream_t stream) {
    if (smem_bytes > 48 * 1024) {
        check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
                   "shared memory of a kernel");
    }
    kernel<<<blocks, threads, smem_bytes, stream>>>(p);
    check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace hybrid_ep::kernels
