#include "copy_engine.h"

#include <cuda.h>

#include <algorithm>
#include <limits>
#include <string>

#include "check.h"

namespace hybrid_ep {
namespace {

// Little at first, so that peers can soon begin to pull; each step is two calls of the driver.
constexpr int kFirstRows = 256, kGrowth = 4, kMostRows = 4096;

using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);
using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

constexpr unsigned int kCudaVersion = 12000;  // whose variants of the functions are wanted

// The driver is not linked, so that the extension loads where there is none.
template <typename Function>
Function in_driver(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(
        cudaGetDriverEntryPointByVersion(name, &found, kCudaVersion, cudaEnableDefault, &result),
        name);
    if (found == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
    return reinterpret_cast<Function>(found);
}

// CUDA numbers devices as the driver does.
bool can_raise_flags(int device) {
    static const auto get_attribute = in_driver<GetAttribute>("cuDeviceGetAttribute");
    int can = 0;
    return get_attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) ==
               CUDA_SUCCESS &&
           can != 0;
}

// Behind all that was copied on the stream before, for everybody to see.
void raise_flag(uint64_t* at, uint64_t flag, cudaStream_t stream) {
    static const auto write_value = in_driver<WriteValue>("cuStreamWriteValue64");
    if (write_value(stream, reinterpret_cast<CUdeviceptr>(at), flag, 0) != CUDA_SUCCESS) {
        throw std::runtime_error("the flag behind published rows could not be queued");
    }
}

}  // namespace

CopyEngine::CopyEngine(int device) : can_raise_flags_(can_raise_flags(device)) {
    try {
        check_cuda(cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking), "stream of copies");
        check_cuda(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming), "event of copies");
    } catch (...) {
        destroy();
        throw;
    }
}

void CopyEngine::destroy() {
    if (before_ != nullptr) cudaEventDestroy(before_);
    if (own_ != nullptr) cudaStreamDestroy(own_);
}

bool CopyEngine::can_copy(int64_t stride, int row_bytes) const {
    return can_raise_flags_ && stride >= row_bytes && stride <= std::numeric_limits<int>::max();
}

kernels::CopySteps CopyEngine::copy(const Rows<const char>& from, const Rows<char>& to,
                                    int row_bytes, int begin, int end, uint64_t* flags,
                                    uint64_t flag, cudaStream_t stream) {
    check_cuda(cudaEventRecord(before_, stream), "event of copies");
    check_cuda(cudaStreamWaitEvent(own_, before_), "stream of copies");
    kernels::CopySteps steps{begin};
    for (int rows = kFirstRows; begin < end; rows = std::min(rows * kGrowth, kMostRows)) {
        const bool is_last = steps.count + 1 == kernels::CopySteps::kMost;
        const int count = is_last ? end - begin : std::min(rows, end - begin);
        check_cuda(
            cudaMemcpy2DAsync(to.at + begin * to.stride, to.stride, from.at + begin * from.stride,
                              from.stride, row_bytes, count, cudaMemcpyDeviceToDevice, own_),
            "publishing rows");
        raise_flag(flags + steps.count, flag, own_);
        steps.end[steps.count++] = begin += count;
    }
    return steps;
}

}  // namespace hybrid_ep
