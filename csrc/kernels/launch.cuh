// The one place where a kernel is launched.
#pragma once

#include <string>
#include <type_traits>

#include "check.h"
#include "kernels/loading.h"

namespace hybrid_ep::kernels {

// A kernel that is loaded with all others (loading.h): kKernel<function>, there is no other way to
// get one.
template <typename P>
class Kernel {
  public:
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

inline void require_shared_memory(const void* kernel, int wanted) {
    const int most = dynamic_shared_memory(kernel);
    if (wanted <= most) return;
    throw std::runtime_error("a kernel needs " + std::to_string(wanted) +
                             " bytes of dynamic shared memory, this GPU has " +
                             std::to_string(most) + " for a block");
}

// Params are those of the kernel, so that braces will do for `p`.
template <typename Params>
void launch(const Kernel<Params>& kernel, const std::decay_t<Params>& p, int blocks, int threads,
            int smem_bytes, cudaStream_t stream) {
    require_shared_memory(kernel.address(), smem_bytes);
    kernel.function()<<<blocks, threads, smem_bytes, stream>>>(p);
    check_cuda(cudaGetLastError(), "kernel launch");
}

// Behind a kernel of ours, the last one on the stream: the blocks may be placed on SMs while that
// one ends, and call await_kernel_before() first of all.
template <typename Params>
void launch_behind_ours(const Kernel<Params>& kernel, const std::decay_t<Params>& p, int blocks,
                        int threads, int smem_bytes, cudaStream_t stream) {
    require_shared_memory(kernel.address(), smem_bytes);
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
