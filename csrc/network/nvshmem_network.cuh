// The network between rail peers as NVSHMEM has it: through IBGDA queue pairs, through a proxy
// thread, or where the peer's memory is mapped by stores. Only its public device API is used.
//
// The verbs are those that the kernels of several nodes (kernels/*/several_nodes.cuh) ask of a type
// Network. An address in a peer's memory is named by that of the same offset in mine, a peer by
// its rank.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "network/context.h"

namespace hybrid_ep::network {

class NvshmemNetwork {
  public:
    __device__ explicit NvshmemNetwork(const NodesContext& context)
        : uses_mapped_(context.uses_mapped) {}

    // Where an address of a peer's memory is mapped; null where only the network gets there.
    __device__ void* mapped(void* address, int rank) const {
        return uses_mapped_ ? nvshmem_ptr(address, rank) : nullptr;
    }

    // The whole block or warp. Returns before the bytes have arrived; `from` is symmetric memory
    // and must not change until the peer has said that it is done with them. The signal comes
    // behind these bytes, whatever else is under way: invariant "signal behind its bytes".
    __device__ void put_block(void* to, const void* from, size_t bytes, int rank,
                              Signal signal) const {
        nvshmemx_putmem_signal_nbi_block(to, from, bytes, signal.flag, signal.value,
                                         operation(signal), rank);
    }
    __device__ void put_warp(void* to, const void* from, size_t bytes, int rank,
                             Signal signal) const {
        nvshmemx_putmem_signal_nbi_warp(to, from, bytes, signal.flag, signal.value,
                                        operation(signal), rank);
    }
    // One thread: a signal by itself, ordered behind nothing.
    __device__ void signal(Signal signal, int rank) const {
        nvshmemx_signal_op(signal.flag, signal.value, operation(signal), rank);
    }

  private:
    static __device__ int operation(Signal signal) {
        return signal.adds ? NVSHMEM_SIGNAL_ADD : NVSHMEM_SIGNAL_SET;
    }

    bool uses_mapped_;
};

}  // namespace hybrid_ep::network
