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

// Behind all that was copied on the stream before, visible to all ranks.
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

// Not where the driver cannot raise flags between the copies of a stream, as on some virtual GPUs.
// Nor once a graph was made: it is replayed without the host, which then does not know any more
// which half of the outbox the next call takes.
bool CopyEngine::can_publish(const kernels::DispatchParams& p, cudaStream_t stream) {
    cudaStreamCaptureStatus capture{};
    check_cuda(cudaStreamIsCapturing(stream, &capture), "state of the stream");
    was_captured_ = was_captured_ || capture != cudaStreamCaptureStatusNone;
    return can_raise_flags_ && !was_captured_ && p.context.buffer.num_ranks > 1 &&
           p.sent.x_stride >= p.sent.row_bytes &&
           p.sent.x_stride <= std::numeric_limits<int>::max();
}

void CopyEngine::publish(kernels::DispatchParams& p, int num_sms, uint64_t call,
                         cudaStream_t stream) {
    const Sent& sent = p.sent;
    int token = tokens_by_sms(num_sms, sent.num_tokens);
    if (!can_publish(p, stream) || token == sent.num_tokens) return;
    check_cuda(cudaEventRecord(before_, stream), "event of copies");
    check_cuda(cudaStreamWaitEvent(own_, before_), "stream of copies");
    kernels::EngineSteps& steps = p.copied = {token};
    for (int most = kFirstRows; token < sent.num_tokens;
         most = std::min(most * kGrowth, kMostRows)) {
        const int left = sent.num_tokens - token;
        const bool is_last = steps.count + 1 == kernels::EngineSteps::kMost;
        const int count = is_last ? left : std::min(most, left);
        char* record = p.context.mine() + p.context.buffer.record(call, token);
        check_cuda(
            cudaMemcpy2DAsync(record, p.context.buffer.record_bytes, sent.x + token * sent.x_stride,
                              sent.x_stride, sent.row_bytes, count, cudaMemcpyDeviceToDevice, own_),
            "publishing rows");
        raise_flag(p.context.watch.state->rows_copied + steps.count,
                   flag_value(call, kCopiedSignature), own_);
        steps.end[steps.count++] = token += count;
    }
}

}  // namespace hybrid_ep
