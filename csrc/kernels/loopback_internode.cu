#include "device/loopback_network.cuh"
#include "kernels/internode_give_up.cuh"
#include "kernels/internode_routing.cuh"
#include "kernels/internode_rows.cuh"
#include "kernels/internode_sums.cuh"
#include "kernels/loopback.h"

namespace hybrid_ep::kernels {

void spread_routing_loopback(const SpreadRoutingParams& p, cudaStream_t stream) {
    internode::launch_spread_routing<device::LoopbackNetwork>(p, stream);
}

void relay_rows_loopback(const RelayRowsParams& p, cudaStream_t stream) {
    internode::launch_relay_rows<device::LoopbackNetwork>(p, stream);
}

void relay_sums_loopback(const RelaySumsParams& p, cudaStream_t stream) {
    internode::launch_relay_sums<device::LoopbackNetwork>(p, stream);
}

void give_up_loopback(const GiveUpParams& p, cudaStream_t stream) {
    internode::launch_give_up<device::LoopbackNetwork>(p, stream);
}

}  // namespace hybrid_ep::kernels
