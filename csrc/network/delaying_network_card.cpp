#include "network/delaying_network_card.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "check.h"

namespace hybrid_ep {
namespace {

using namespace std::chrono;

constexpr size_t kMostAtOnce = 512;

uint64_t now_us() {
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

template <typename T>
T* mapped_host(size_t count) {
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocMapped), "queue of puts");
    std::fill_n(static_cast<char*>(memory), count * sizeof(T), 0);
    return static_cast<T*>(memory);
}

}  // namespace

DelayingNetworkCard::DelayingNetworkCard(int device, int most_us, uint32_t seed)
    : device_(device), most_us_(most_us), random_(seed) {
    try {
        puts_ = mapped_host<PostedPut>(PutQueue::kCapacity);
        taken_ = mapped_host<uint64_t>(1);
        signals_ = mapped_host<uint64_t>(kMostAtOnce);
        check_cuda(cudaMalloc(&posted_, sizeof(uint64_t)), "queue of puts");
        check_cuda(cudaMemset(posted_, 0, sizeof(uint64_t)), "queue of puts");
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream of puts");
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        free_memory();
        throw;
    }
}

DelayingNetworkCard::~DelayingNetworkCard() {
    is_stopping_ = true;
    if (thread_.joinable()) thread_.join();
    free_memory();
}

void DelayingNetworkCard::free_memory() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaFree(posted_);
    cudaFreeHost(signals_);
    cudaFreeHost(taken_);
    cudaFreeHost(puts_);
}

PutQueue DelayingNetworkCard::queue() const { return {puts_, posted_, taken_}; }

// The thread. What it does is no part of a graph that another thread captures.
void DelayingNetworkCard::run() {
    cudaSetDevice(device_);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    while (true) {
        const bool is_last = is_stopping_;  // asked before the queue is read
        take_posted();
        if (carry_out_due()) continue;
        if (is_last && waiting_.empty()) return;
        std::this_thread::sleep_for(microseconds(10));
    }
}

void DelayingNetworkCard::take_posted() {
    for (uint64_t next = *taken_ + 1;; ++next) {
        const PostedPut& posted = puts_[next % PutQueue::kCapacity];
        if (__atomic_load_n(&posted.number, __ATOMIC_ACQUIRE) != next) return;
        const int most = most_us_ * (random_() % 64 == 0 ? 16 : 1);
        waiting_.push_back({posted, now_us() + random_() % (most + 1)});
        __atomic_store_n(taken_, next, __ATOMIC_RELEASE);
    }
}

// Whether there was one. At the end all are due. Those that are due at once go together, in an
// order by chance: a GPU that several processes share lets each of them copy in turns of
// milliseconds.
bool DelayingNetworkCard::carry_out_due() {
    const uint64_t now = now_us();
    std::shuffle(waiting_.begin(), waiting_.end(), random_);
    const auto due = std::partition(waiting_.begin(), waiting_.end(), [&](const Waiting& each) {
        return !is_stopping_ && each.due_us > now;
    });
    const size_t count = std::min<size_t>(waiting_.end() - due, kMostAtOnce);
    if (count == 0) return false;
    for (size_t i = 0; i < count; ++i, waiting_.pop_back()) {
        start(waiting_.back().put, signals_ + i);
    }
    cudaStreamSynchronize(stream_);
    return true;
}

// A failure is said here, and peers wait in vain. `signal` is read later.
void DelayingNetworkCard::start(const PostedPut& put, uint64_t* signal) {
    auto copy = [this](void* to, const void* from, size_t bytes) {
        const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_);
        if (error != cudaSuccess) fprintf(stderr, "a put failed: %s\n", cudaGetErrorString(error));
    };
    if (put.bytes > 0) copy(put.to, put.from, put.bytes);
    uint64_t& sum = sums_[put.flag];
    sum = put.adds ? sum + put.value : put.value;
    *signal = sum;
    copy(put.flag, signal, sizeof(uint64_t));
}

}  // namespace hybrid_ep
