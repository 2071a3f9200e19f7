// The one place where a kernel is launched.
#pragma once

#include <map>
#include <string>
#include <utility>

#include "check.h"
#include "kernels/loading.h"

namespace hybrid_ep::kernels {

// A kernel that is loaded with all others (loading.h): kKernel<function>, there is no other way to
// get one.
template <typename P>
class Kernel {
  public:
    using Params = P;
    using Function = void (*)(P);

    Function function() const { return function_; }
    const void* address() const { return reinterpret_cast<const void*>(function_); }

  private:
    explicit Kernel(Function function) : function_(function) { register_kernel(address()); }

    template <auto kernel>
    friend struct Registered;

    Function function_;
};

template <auto kernel>
struct Registered {
    template <typename P>
    static Kernel<P> make(void (*function)(P)) {
        return Kernel<P>(function);
    }
    static inline const auto kHandle = make(kernel);
};

// To name it anywhere in an extension registers the kernel when that is imported.
template <auto kernel>
constexpr const auto& kKernel = Registered<kernel>::kHandle;

// Lets a kernel have as much dynamic shared memory as the device has beside the static part; asked
// once a kernel and device. Always the same value, so threads that race for it do no harm.
inline void allow_shared_memory(const void* kernel, int wanted) {
    static thread_local std::map<std::pair<int, const void*>, int> allowed;
    int device = 0, most = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    int& given = allowed[{device, kernel}];
    if (given > 0 && wanted <= given) return;
    cudaFuncAttributes attributes{};
    check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "shared memory of the device");
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "shared memory of a kernel");
    most -= int(attributes.sharedSizeBytes);
    if (wanted > most) {
        throw std::runtime_error("a kernel needs " + std::to_string(wanted) +
                                 " bytes of dynamic shared memory, this GPU has " +
                                 std::to_string(most) + " for a block");
    }
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
               "shared memory of a kernel");
    // the same division of the SM for all kernels: changing it takes time between two of them
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               "shared memory of a kernel");
    given = most;
}

// Params are those of the kernel, so that braces will do for `p`.
template <typename Params>
void launch(const Kernel<Params>& kernel, const std::decay_t<Params>& p, int blocks, int threads,
            int smem_bytes, cudaStream_t stream) {
    allow_shared_memory(kernel.address(), smem_bytes);
    kernel.function()<<<blocks, threads, smem_bytes, stream>>>(p);
    check_cuda(cudaGetLastError(), "kernel launch");
}

// Behind a kernel of ours, the last one on the stream: the blocks may be placed on SMs while that
// one ends, and call await_kernel_before() first of all.
template <typename Params>
void launch_behind_ours(const Kernel<Params>& kernel, const std::decay_t<Params>& p, int blocks,
                        int threads, int smem_bytes, cudaStream_t stream) {
    allow_shared_memory(kernel.address(), smem_bytes);
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel.function(), p), "kernel launch");
}

}  // namespace hybrid_ep::kernels
