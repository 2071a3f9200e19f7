// A network card for tests, made of a kernel that runs beside each kernel that puts: carries out
// the puts as late and in such an order as NVSHMEM's contract allows. A put's signal comes behind
// its own bytes; nothing else is ordered, and the bytes are read when they are sent.
//
// It wants room on an SM for its warps, so a Buffer that takes all SMs of the GPU cannot have one.
// It is a kernel since a thread of the host would need the driver while others hold it: a
// copy from pageable memory, or the loading of a kernel, waits there for kernels that wait for
// puts.
#pragma once

#include <cuda_runtime.h>

#include "kernels/several_nodes.h"
#include "network/put_queue.h"

namespace hybrid_ep {

class DelayingCard {
  public:
    // On the current device.
    explicit DelayingCard(int most_us);
    ~DelayingCard();  // once no kernel posts any more, and all that was posted has arrived
    DelayingCard(const DelayingCard&) = delete;
    DelayingCard& operator=(const DelayingCard&) = delete;

    PutQueue queue();

    // Around the launch of a kernel that puts. The card works beside it, until all is carried out
    // that the kernel posts; it comes second, as a kernel may be loaded only while nothing waits.
    void before(cudaStream_t stream);
    void behind(cudaStream_t stream) noexcept;

  private:
    void free_memory();

    PutQueue queue_{};
    cudaStream_t beside_ = nullptr;
    cudaEvent_t fork_ = nullptr, join_ = nullptr;  // join: where the stream is captured
};

// The card at work for the launches of a scope.
class CardAtWork {
  public:
    CardAtWork(const PutQueue& queue, cudaStream_t stream) : card_(queue.card), stream_(stream) {
        if (card_ != nullptr) card_->before(stream_);
    }
    ~CardAtWork() {
        if (card_ != nullptr) card_->behind(stream_);
    }
    CardAtWork(const CardAtWork&) = delete;
    CardAtWork& operator=(const CardAtWork&) = delete;

  private:
    DelayingCard* card_;
    cudaStream_t stream_;
};

// The launchers over a network, with the card at work if there is one.
template <auto launch, typename Params>
void launch_beside_card(const NodesContext& context, const Params& p, cudaStream_t stream) {
    const CardAtWork card(context.queue, stream);
    launch(context, p, stream);
}
template <typename Network>
constexpr kernels::Launchers beside_card() {
    using namespace kernels::several_nodes;
    kernels::Launchers launchers = kLaunchersOver<Network>;
    launchers.publish_routing = launch_beside_card<launch_publish_routing<Network>>;
    launchers.dispatch = launch_beside_card<launch_dispatch<Network>>;
    launchers.combine_backward = launch_beside_card<launch_combine_backward<Network>>;
    launchers.combine = launch_beside_card<launch_combine<Network>>;
    launchers.give_up = launch_beside_card<launch_give_up<Network>>;
    return launchers;
}

}  // namespace hybrid_ep
