#include "kernels/loading.h"

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <vector>

#include "check.h"

namespace hybrid_ep::kernels {
namespace {

// In a function: kernels are registered while other variables of files are still being made.
std::vector<const void*>& all_kernels() {
    static std::vector<const void*> kernels;
    return kernels;
}

}  // namespace

void register_kernel(const void* kernel) { all_kernels().push_back(kernel); }

void load_kernels() {
    static std::mutex mutex;
    static std::set<int> done;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    const std::lock_guard<std::mutex> lock(mutex);
    if (done.count(device) > 0) return;
    for (const void* kernel : all_kernels()) {
        cudaFuncAttributes unused{};  // to ask for them loads the kernel
        check_cuda(cudaFuncGetAttributes(&unused, kernel), "loading a kernel");
    }
    done.insert(device);
}

int num_kernels() { return int(all_kernels().size()); }

}  // namespace hybrid_ep::kernels
