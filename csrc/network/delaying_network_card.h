// A network card for tests, made of a thread: carries out the puts that kernels post as late and in
// such an order as NVSHMEM's contract allows. A put's signal comes behind its own bytes; nothing
// else is ordered, and the bytes are read when they are sent.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "network/put_queue.h"

namespace hybrid_ep {

class DelayingNetworkCard {
  public:
    // `most_us`: a put waits for up to so many microseconds, evenly distributed; one in 64 waits
    // for up to 16 times as many.
    DelayingNetworkCard(int device, int most_us, uint32_t seed);
    ~DelayingNetworkCard();  // once no kernel posts any more: carries out what is posted
    DelayingNetworkCard(const DelayingNetworkCard&) = delete;
    DelayingNetworkCard& operator=(const DelayingNetworkCard&) = delete;

    PutQueue queue() const;

  private:
    struct Waiting {
        PostedPut put;
        uint64_t due_us;
    };

    void free_memory();
    void run();
    void take_posted();
    bool carry_out_due();
    void start(const PostedPut& put, uint64_t* signal);

    int device_, most_us_;
    std::mt19937 random_;
    cudaStream_t stream_ = nullptr;
    PostedPut* puts_ = nullptr;
    uint64_t *taken_ = nullptr, *signals_ = nullptr;  // in mapped host memory
    uint64_t* posted_ = nullptr;
    std::vector<Waiting> waiting_;
    std::unordered_map<uint64_t*, uint64_t> sums_;  // of flags that puts add to
    std::atomic<bool> is_stopping_{false};
    std::thread thread_;
};

}  // namespace hybrid_ep
