#include "kernels/loading.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <vector>

#include "check.h"

namespace hybrid_ep::kernels {
namespace {

// In a function: kernels are registered while other variables of files are still being made.
std::vector<const void*>& all_kernels() {
    static std::vector<const void*> kernels;
    return kernels;
}

// To ask for its attributes loads a kernel. It gets as much dynamic shared memory as a block may
// have beside the static part, and all kernels the same division of the SM: changing that takes
// time between two of them.
int load(const void* kernel, int device) {
    constexpr const char* kWhat = "loading a kernel";
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), kWhat);
    const int most = shared_memory_per_block(device) - int(attributes.sharedSizeBytes);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
               kWhat);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               kWhat);
    return most;
}

bool ask_for_pairs(const void* kernel, int threads, int smem_bytes) {
    cudaLaunchAttribute pairs{};
    pairs.id = cudaLaunchAttributeClusterDimension;
    pairs.val.clusterDim.x = 2;
    pairs.val.clusterDim.y = pairs.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(2);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.attrs = &pairs;
    config.numAttrs = 1;
    int clusters = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "room for clusters");
    return clusters > 0;
}

}  // namespace

void register_kernel(const void* kernel) { all_kernels().push_back(kernel); }

void load_kernels() {
    for (const void* kernel : all_kernels()) dynamic_shared_memory(kernel);
}

int dynamic_shared_memory(const void* kernel) {
    static std::mutex mutex;
    static std::map<std::pair<int, const void*>, int> loaded;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = loaded.find({device, kernel});
    if (found != loaded.end()) return found->second;
    return loaded[{device, kernel}] = load(kernel, device);
}

bool fit_in_pairs(const void* kernel, int threads) {
    static std::mutex mutex;
    static std::map<std::pair<int, const void*>, bool> asked;
    const int smem_bytes = dynamic_shared_memory(kernel);
    int device = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = asked.find({device, kernel});
    if (found != asked.end()) return found->second;
    return asked[{device, kernel}] = ask_for_pairs(kernel, threads, smem_bytes);
}

int num_kernels() { return int(all_kernels().size()); }

}  // namespace hybrid_ep::kernels
