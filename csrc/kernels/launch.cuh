// The one place where a kernel of the library is launched; the card of tests has its own.
#pragma once

#include <string>
#include <type_traits>

#include "check.h"
#include "device/vector.cuh"
#include "kernels/loading.h"
#include "kernels/verbs.h"

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

// `pick(T{})`, a kernel, for the type T of a call's sums.
template <typename Pick>
auto for_type(SumType type, Pick pick) {
    return type == SumType::kBf16   ? pick(__nv_bfloat16{})
           : type == SumType::kFp16 ? pick(__half{})
                                    : pick(float{});
}

inline void require_shared_memory(const void* kernel, int wanted) {
    const int most = dynamic_shared_memory(kernel);
    if (wanted <= most) return;
    throw std::runtime_error("a kernel needs " + std::to_string(wanted) +
                             " bytes of dynamic shared memory, this GPU has " +
                             std::to_string(most) + " for a block");
}

// How the blocks of a kernel are placed.
struct Placement {
    // Behind a kernel of ours, the last one on the stream. The blocks may be placed on SMs while
    // that one ends, and call await_kernel_before() first of all.
    bool behind_ours = false;
    // On pairs of SMs, where their number is even, as clusters of two. For kernels that may run
    // long beside GEMMs: those of cuBLAS and CUTLASS are launched in clusters too, which need a
    // pair or more in one GPC. Beside single SMs of ours some of theirs stay idle, and a GEMM that
    // leaves our SMs free takes two rounds all the same (docs/performance.md, 43).
    bool in_pairs = false;
};
constexpr Placement kInPairs{/*behind_ours=*/false, /*in_pairs=*/true};

// Params are those of the kernel, so that braces will do for `p`.
template <typename Params>
void launch(const Kernel<Params>& kernel, const std::decay_t<Params>& p, int blocks, int threads,
            int smem_bytes, cudaStream_t stream, Placement placement = {}) {
    require_shared_memory(kernel.address(), smem_bytes);
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (placement.behind_ours) {
        auto& early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (placement.in_pairs && blocks % 2 == 0 && fit_in_pairs(kernel.address(), threads)) {
        auto& pairs = attributes[config.numAttrs++];
        pairs.id = cudaLaunchAttributeClusterDimension;
        pairs.val.clusterDim.x = 2;
        pairs.val.clusterDim.y = pairs.val.clusterDim.z = 1;
    }
    check_cuda(cudaLaunchKernelEx(&config, kernel.function(), p), "kernel launch");
}

}  // namespace hybrid_ep::kernels
