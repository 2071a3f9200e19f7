// The kernels of several nodes over NVSHMEM. Their device code is linked with NVSHMEM's.
#pragma once

#include "kernels/internode.h"

namespace hybrid_ep::kernels {

void spread_routing_nvshmem(const SpreadRoutingParams& p, cudaStream_t stream);
void relay_rows_nvshmem(const RelayRowsParams& p, cudaStream_t stream);
void relay_sums_nvshmem(const RelaySumsParams& p, cudaStream_t stream);
void give_up_nvshmem(const GiveUpParams& p, cudaStream_t stream);

// Ends when everything that this rank has put has arrived.
void launch_quiet_nvshmem(cudaStream_t stream);

constexpr NetworkKernels kNvshmemKernels{spread_routing_nvshmem, relay_rows_nvshmem,
                                         relay_sums_nvshmem, give_up_nvshmem};

}  // namespace hybrid_ep::kernels
