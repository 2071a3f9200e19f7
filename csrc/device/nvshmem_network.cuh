// The network between rail peers as NVSHMEM has it: through IBGDA queue pairs, through a proxy
// thread, or where the peer's memory is mapped by stores. Only its public device API is used.
//
// The verbs are those that the kernels of several nodes (kernels/internode_*.cuh) ask of a type
// Network. A place in a peer's memory is named by the same place in mine, a peer by its rank.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "kernels/internode.h"

namespace hybrid_ep::device {

class NvshmemNetwork {
  public:
    __device__ explicit NvshmemNetwork(const kernels::NodeContext& context)
        : uses_mapped_(context.uses_mapped) {}

    // Where a place of a peer's memory is in mine; null where only the network gets there.
    __device__ void* mapped(void* place, int rank) const {
        return uses_mapped_ ? nvshmem_ptr(place, rank) : nullptr;
    }

    // The whole block or warp. Returns before the bytes have arrived; `from` is symmetric memory
    // and must not change until the peer has said that it is done with them.
    __device__ void put_block(void* to, const void* from, size_t bytes, int rank) const {
        nvshmemx_putmem_nbi_block(to, from, bytes, rank);
    }
    // Then, where `flag` is not null, sets it at the peer: behind these bytes, but not behind those
    // of earlier puts.
    __device__ void put_warp(void* to, const void* from, size_t bytes, int rank, uint64_t* flag,
                             uint64_t value) const {
        if (flag == nullptr) {
            nvshmemx_putmem_nbi_warp(to, from, bytes, rank);
        } else {
            nvshmemx_putmem_signal_nbi_warp(to, from, bytes, flag, value, NVSHMEM_SIGNAL_SET, rank);
        }
    }
    // One thread: what its block or warp has put before arrives before what comes after. Over IBGDA
    // it waits until the queues are empty.
    __device__ void fence() const { nvshmem_fence(); }
    // One thread.
    __device__ void signal(uint64_t* flag, uint64_t value, int rank) const {
        nvshmemx_signal_op(flag, value, NVSHMEM_SIGNAL_SET, rank);
    }

  private:
    bool uses_mapped_;
};

}  // namespace hybrid_ep::device
