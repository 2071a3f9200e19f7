// A network of plain stores into mapped memory, with the verbs of NvshmemNetwork: what the kernels
// of several nodes do can be tried on one host without NVSHMEM.
#pragma once

#include "device/ptx.cuh"
#include "device/warp_copy.cuh"
#include "kernels/internode.h"

namespace hybrid_ep::device {

class LoopbackNetwork {
  public:
    __device__ explicit LoopbackNetwork(const kernels::NodeContext& context) : context_(context) {}

    // As if nothing were, so that everything is put.
    __device__ void* mapped(void*, int) const { return nullptr; }

    __device__ void put_block(void* to, const void* from, size_t bytes, int rank) const {
        if (warp_id() == 0) copy_warp(theirs(to, rank), from, bytes);
        __syncthreads();
    }
    __device__ void put_warp(void* to, const void* from, size_t bytes, int rank, uint64_t* flag,
                             uint64_t value) const {
        copy_warp(theirs(to, rank), from, bytes);
        if (flag != nullptr && lane_id() == 0) signal(flag, value, rank);
        __syncwarp();
    }
    __device__ void fence() const { __threadfence_system(); }
    // A call, as NVSHMEM's is.
    __device__ __noinline__ void signal(uint64_t* flag, uint64_t value, int rank) const {
        ptx::store_release(static_cast<uint64_t*>(theirs(flag, rank)), value);
    }

  private:
    // The peer is on my rail, so its node tells it apart.
    __device__ void* theirs(void* place, int rank) const {
        return context_.rails.base[rank / context_.relay.ranks_per_node] +
               (static_cast<char*>(place) - context_.mine());
    }

    const kernels::NodeContext& context_;
};

}  // namespace hybrid_ep::device
