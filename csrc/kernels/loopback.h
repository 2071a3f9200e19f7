// The kernels of several nodes over mapped memory: for tests on one host, without NVSHMEM.
#pragma once

#include "kernels/internode.h"

namespace hybrid_ep::kernels {

void spread_routing_loopback(const SpreadRoutingParams& p, cudaStream_t stream);
void relay_rows_loopback(const RelayRowsParams& p, cudaStream_t stream);
void relay_sums_loopback(const RelaySumsParams& p, cudaStream_t stream);
void give_up_loopback(const GiveUpParams& p, cudaStream_t stream);

constexpr NetworkKernels kLoopbackKernels{spread_routing_loopback, relay_rows_loopback,
                                          relay_sums_loopback, give_up_loopback};

}  // namespace hybrid_ep::kernels
