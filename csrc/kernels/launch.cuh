// The one place where a kernel is launched.
#pragma once

#include <set>
#include <utility>

#include "check.h"

namespace hybrid_ep::kernels {

// Lets a kernel have as much dynamic shared memory as the device has beside the static part; asked
// once a kernel and device. Always the same value, so threads that race for it do no harm.
template <typename Params>
void allow_shared_memory(void (*kernel)(Params)) {
    static thread_local std::set<std::pair<int, void (*)(Params)>> allowed;
    int device = 0, most = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    if (!allowed.insert({device, kernel}).second) return;
    auto* function = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes attributes{};
    check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "shared memory of the device");
    check_cuda(cudaFuncGetAttributes(&attributes, function), "shared memory of a kernel");
    check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    most - int(attributes.sharedSizeBytes)),
               "shared memory of a kernel");
}

template <typename Params>
void launch(void (*kernel)(Params), const Params& p, int blocks, int threads, int smem_bytes,
            cudaStream_t stream) {
    allow_shared_memory(kernel);
    kernel<<<blocks, threads, smem_bytes, stream>>>(p);
    check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace hybrid_ep::kernels
