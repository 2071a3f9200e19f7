// A network without cards, over mapped memory, with the verbs of NvshmemNetwork: what the kernels
// of several nodes do can be tried on one host without NVSHMEM. Puts are plain stores, or are
// posted to a card (kernels/delaying_card.h) that carries them out late and in any order.
#pragma once

#include "device/ptx.cuh"
#include "device/warp_copy.cuh"
#include "network/context.h"

namespace hybrid_ep::network {

using namespace device;

class LoopbackNetwork {
  public:
    __device__ explicit LoopbackNetwork(const NodesContext& context) : context_(context) {}

    // As if nothing were, so that everything is put.
    __device__ void* mapped(void*, int) const { return nullptr; }

    __device__ void put_block(void* to, const void* from, size_t bytes, int rank,
                              Signal behind) const {
        if (warp_id() == 0) put_warp(to, from, bytes, rank, behind);
        __syncthreads();
    }
    __device__ void put_warp(void* to, const void* from, size_t bytes, int rank,
                             Signal behind) const {
        if (is_delayed()) {
            if (lane_id() == 0) post(theirs(to, rank), from, bytes, rank, behind);
        } else {
            copy_warp(theirs(to, rank), from, bytes);
            if (lane_id() == 0) signal(behind, rank);
        }
        __syncwarp();
    }
    // A call, as NVSHMEM's is.
    __device__ __noinline__ void signal(Signal signal, int rank) const {
        auto* flag = reinterpret_cast<uint64_t*>(theirs(signal.flag, rank));
        if (is_delayed()) {
            post(nullptr, nullptr, 0, rank, signal);
        } else if (signal.adds) {
            ptx::add_release(flag, signal.value);
        } else {
            ptx::store_release(flag, signal.value);
        }
    }

  private:
    __device__ bool is_delayed() const { return context_.queue.puts != nullptr; }

    // The peer is on my rail, so its node tells it apart.
    __device__ char* theirs(const void* address, int rank) const {
        return context_.rails.base[rank / context_.nodes.ranks_per_node] +
               (static_cast<const char*>(address) - context_.mine());
    }

    // One thread, for a warp or block that has met since it wrote the bytes.
    __device__ void post(char* to, const void* from, size_t bytes, int rank, Signal behind) const {
        const PutQueue& queue = context_.queue;
        const uint64_t number =
            atomicAdd(reinterpret_cast<unsigned long long*>(queue.posted), 1ull) + 1;
        const uint64_t* next = &queue.next[number % PutQueue::kCarriers];
        while (number >= ptx::load_acquire(next) + PutQueue::kCapacity) continue;
        PostedPut& put = queue.puts[number % PutQueue::kCapacity];
        put.to = to;
        put.from = static_cast<const char*>(from);
        put.bytes = bytes;
        put.flag = reinterpret_cast<uint64_t*>(theirs(behind.flag, rank));
        put.value = behind.value;
        put.adds = behind.adds;
        ptx::store_release(&put.number, number);
    }

    const NodesContext& context_;
};

}  // namespace hybrid_ep::network
