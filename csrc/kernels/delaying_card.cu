#include "check.h"
#include "kernels/delaying_card.h"
#include "network/carry_puts.cuh"

namespace hybrid_ep {
namespace {

constexpr int kCardThreads = PutQueue::kCarriers * device::kWarp;

// A warp for each carrier.
__global__ void __launch_bounds__(kCardThreads, 1) card(PutQueue q) {
    __shared__ uint64_t launch;
    if (threadIdx.x == 0) {
        launch = network::count(q.begun);
        network::await_turn(q, launch);
    }
    __syncthreads();
    network::carry_puts(q, device::warp_id(), launch);
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();  // what the warps keep for the next launch comes first
    network::count(q.ended);
}

__global__ void kernel_is_over(PutQueue q) { network::count(q.over); }

__global__ void first_puts(PutQueue q) {
    q.next[threadIdx.x] = threadIdx.x == 0 ? PutQueue::kCarriers : threadIdx.x;
}

template <typename T>
void make(T*& memory, size_t count) {
    check_cuda(cudaMalloc(&memory, count * sizeof(T)), "queue of puts");
    check_cuda(cudaMemset(memory, 0, count * sizeof(T)), "queue of puts");
}

// A kernel is loaded by its first launch, which may wait for kernels that run.
void load(void (*kernel)(PutQueue)) {
    cudaFuncAttributes unused{};
    check_cuda(cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(kernel)), "the card");
}

bool is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
}

}  // namespace

DelayingCard::DelayingCard(int most_us) {
    try {
        make(queue_.puts, PutQueue::kCapacity);
        make(queue_.posted, 1);
        make(queue_.next, PutQueue::kCarriers);
        make(queue_.begun, 1);
        make(queue_.ended, 1);
        make(queue_.over, 1);
        first_puts<<<1, PutQueue::kCarriers>>>(queue_);
        // of the highest priority: such a stream waits behind no launch of an ordinary one
        int lowest = 0, highest = 0;
        check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "stream of puts");
        check_cuda(cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, highest),
                   "stream of puts");
        for (cudaEvent_t* event : {&fork_, &join_}) {
            check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "stream of puts");
        }
        load(card);
        load(kernel_is_over);
        check_cuda(cudaDeviceSynchronize(), "queue of puts");
    } catch (...) {
        free_memory();
        throw;
    }
    queue_.most_ns = uint32_t(most_us) * 1000;
    queue_.card = this;
}

DelayingCard::~DelayingCard() {
    cudaStreamSynchronize(beside_);
    free_memory();
}

void DelayingCard::free_memory() {
    if (join_ != nullptr) cudaEventDestroy(join_);
    if (fork_ != nullptr) cudaEventDestroy(fork_);
    if (beside_ != nullptr) cudaStreamDestroy(beside_);
    for (uint64_t* words : {queue_.over, queue_.ended, queue_.begun, queue_.next, queue_.posted}) {
        cudaFree(words);
    }
    cudaFree(queue_.puts);
}

PutQueue DelayingCard::queue() { return queue_; }

void DelayingCard::before(cudaStream_t stream) {
    check_cuda(cudaEventRecord(fork_, stream), "the card beside a stream");
    check_cuda(cudaStreamWaitEvent(beside_, fork_), "the card beside a stream");
}

// Whatever became of the launch: a card and a kernel that is over go together.
void DelayingCard::behind(cudaStream_t stream) noexcept {
    card<<<1, kCardThreads, 0, beside_>>>(queue_);
    kernel_is_over<<<1, 1, 0, stream>>>(queue_);
    if (!is_captured(stream)) return;
    cudaEventRecord(join_, beside_);
    cudaStreamWaitEvent(stream, join_);
}

}  // namespace hybrid_ep
