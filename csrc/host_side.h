// What the runtimes of one and of several nodes do alike before they launch a kernel.
#pragma once

#include "call_state.h"
#include "check.h"
#include "kernels/kernels.h"
#include "kernels/verbs.h"
#include "preconditions.h"

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

// One word into the memory of each peer, past whatever the GPU's kernels wait for. Errors are not
// raised: something has failed already, and perhaps CUDA itself.
inline void tell_peers(const Peers& peers, int num_peers, int64_t offset, uint64_t word) {
    cudaStream_t own = nullptr;
    if (cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) != cudaSuccess) return;
    for (int peer = 0; peer < num_peers; ++peer) {
        if (peers.base[peer] == nullptr) continue;
        cudaMemcpyAsync(peers.base[peer] + offset, &word, sizeof(word), cudaMemcpyHostToDevice,
                        own);
    }
    cudaStreamSynchronize(own);
    cudaStreamDestroy(own);
    cudaGetLastError();
}

// The same on one node and on several: what publishes the routing is not.
inline kernels::AssignRowsParams assign_rows_params(const Context& context, int num_publish_blocks,
                                                    const Choices& choices, const NewLayout& layout,
                                                    bool want_mail, CallState& calls) {
    kernels::AssignRowsParams p{};
    p.context = context;
    p.num_publish_blocks = num_publish_blocks;
    p.align = choices.align;
    p.max_rows = choices.max_rows;
    p.layout = layout;
    if (want_mail) {
        p.ticket = calls.next_ticket();
        p.mail = calls.mail_of(p.ticket);
    }
    return p;
}

// A dispatch whose tokens are all published by SMs, in one launch; where its rows go is not known.
inline kernels::DispatchParams dispatch_params(const Context& context, const Sent& sent,
                                               int slice_bytes) {
    kernels::DispatchParams p{};
    p.context = context;
    p.record = {sent.row_bytes, sent.scale_bytes,
                sent.weights != nullptr ? 4 * context.buffer.topk : 0, sent.dtypes};
    p.end_parcel = layout::ceil_div(sent.num_tokens, layout::kParcelTokens);
    p.copied = {sent.num_tokens};
    p.sent = sent;
    p.slices = layout::SliceLayout::make(sent.row_bytes, slice_bytes);
    p.ring = layout::move_ring(p.slices, p.record);
    require_dispatch(p);
    return p;
}

// Or in two: some of the parcels are published while the host waits for the number of rows, which
// takes about as long; the others beside the pull.
inline void publish_early_parcels(kernels::DispatchParams& p) {
    constexpr int kEarlyEighths = 3;
    p.end_parcel = p.end_parcel * kEarlyEighths / 8;
}
inline void publish_rest(kernels::DispatchParams& p) {
    p.first_parcel = p.end_parcel;
    p.end_parcel = layout::ceil_div(p.sent.num_tokens, layout::kParcelTokens);
}

}  // namespace hybrid_ep
