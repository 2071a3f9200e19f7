#include "copy_engine.h"

#include <cuda.h>

#include <algorithm>
#include <limits>

#include "check.h"

namespace hybrid_ep {
namespace {

// Little at first, so that peers can soon begin to pull; each step is two calls of the driver.
constexpr int kFirstRows = 256, kGrowth = 4, kMostRows = 4096;

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

constexpr unsigned int kCudaVersion = 12000;  // whose variant of the function is wanted

// The driver is not linked, so that the extension loads where there is none.
WriteValue find_write_value() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &found, kCudaVersion,
                                                cudaEnableDefault, &result),
               "cuStreamWriteValue64");
    if (found == nullptr) throw std::runtime_error("the driver has no cuStreamWriteValue64");
    return reinterpret_cast<WriteValue>(found);
}

// Behind all that was copied on the stream before, for everybody to see.
void raise_flag(uint64_t* at, uint64_t flag, cudaStream_t stream) {
    static const WriteValue write_value = find_write_value();
    if (write_value(stream, reinterpret_cast<CUdeviceptr>(at), flag, 0) != CUDA_SUCCESS) {
        throw std::runtime_error("the flag behind published rows could not be queued");
    }
}

}  // namespace

CopyEngine::CopyEngine() {
    check_cuda(cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking), "stream of copies");
    check_cuda(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming), "event of copies");
}

CopyEngine::~CopyEngine() {
    cudaEventDestroy(before_);
    cudaStreamDestroy(own_);
}

bool CopyEngine::can_copy(int64_t stride, int row_bytes) {
    return stride >= row_bytes && stride <= std::numeric_limits<int>::max();
}

kernels::CopySteps CopyEngine::copy(const Rows& from, const Rows& to, int row_bytes, int count,
                                    uint64_t* flags, uint64_t flag, cudaStream_t stream) {
    check_cuda(cudaEventRecord(before_, stream), "event of copies");
    check_cuda(cudaStreamWaitEvent(own_, before_), "stream of copies");
    kernels::CopySteps steps{};
    int begin = 0;
    for (int rows = kFirstRows; begin < count; rows = std::min(rows * kGrowth, kMostRows)) {
        const bool is_last = steps.count + 1 == kernels::CopySteps::kMost;
        const int end = is_last ? count : std::min(begin + rows, count);
        check_cuda(
            cudaMemcpy2DAsync(to.at + begin * to.stride, to.stride, from.at + begin * from.stride,
                              from.stride, row_bytes, end - begin, cudaMemcpyDeviceToDevice, own_),
            "publishing rows");
        raise_flag(flags + steps.count, flag, own_);
        steps.end[steps.count++] = begin = end;
    }
    return steps;
}

}  // namespace hybrid_ep
