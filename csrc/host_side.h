// What the runtimes of one and of several nodes do alike before they launch a kernel.
#pragma once

#include "call_state.h"
#include "check.h"
#include "kernels/kernels.h"
#include "verbs.h"

namespace hybrid_ep {

// Calls may come with another device current: it is put back afterwards.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check_cuda(cudaGetDevice(&before_), "current device");
        if (before_ != device) check_cuda(cudaSetDevice(device), "selecting the device");
        changed_ = before_ != device;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

// Addresses and streams come from Python as integers.
template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}
inline cudaStream_t to_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// The same on one node and on several: what publishes the routing is not.
inline kernels::AssignRowsParams assign_rows_params(const kernels::Context& context,
                                                    int num_publish_blocks, const Choices& choices,
                                                    const NewLayout& layout, bool want_mail,
                                                    CallState& calls) {
    kernels::AssignRowsParams p{};
    p.context = context;
    p.num_publish_blocks = num_publish_blocks;
    p.align = choices.align;
    p.max_rows = choices.max_rows;
    p.words = at<int32_t>(layout.words);
    p.counts = at<int32_t>(layout.counts);
    p.offsets = at<int32_t>(layout.offsets);
    p.required_rows = at<int32_t>(layout.required_rows);
    if (want_mail) {
        p.ticket = calls.next_ticket();
        p.mail = calls.mail_of(p.ticket);
    }
    return p;
}

inline kernels::Tokens tokens_of(const Sent& sent) {
    return {at<char>(sent.x),   at<char>(sent.scales), at<float>(sent.weights), sent.x_stride,
            sent.scales_stride, sent.weights_stride,   sent.num_tokens};
}

inline kernels::ExpertRows rows_of(const Received& received) {
    return {at<char>(received.rows), at<char>(received.row_scales), at<float>(received.row_weights),
            received.num_rows};
}

inline kernels::CombineIo io_of(const Summed& summed) {
    return {kernels::SumType(summed.type), summed.row_bytes,         at<char>(summed.rows),
            at<float>(summed.weights),     at<float>(summed.values), at<char>(summed.y),
            at<float>(summed.home_values), summed.num_tokens};
}

inline layout::RecordLayout record_of(const Sent& sent, int topk) {
    return {sent.row_bytes, sent.scale_bytes, sent.weights != 0 ? 4 * topk : 0};
}

}  // namespace hybrid_ep
