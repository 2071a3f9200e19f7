#include "device/nvshmem_network.cuh"
#include "kernels/internode_give_up.cuh"
#include "kernels/internode_routing.cuh"
#include "kernels/nvshmem.h"

namespace hybrid_ep::kernels {

void spread_routing_nvshmem(const SpreadRoutingParams& p, cudaStream_t stream) {
    internode::launch_spread_routing<device::NvshmemNetwork>(p, stream);
}

void give_up_nvshmem(const GiveUpParams& p, cudaStream_t stream) {
    internode::launch_give_up<device::NvshmemNetwork>(p, stream);
}

}  // namespace hybrid_ep::kernels
