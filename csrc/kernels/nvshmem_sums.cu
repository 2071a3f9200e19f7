#include "device/nvshmem_network.cuh"
#include "kernels/internode_sums.cuh"
#include "kernels/nvshmem.h"

namespace hybrid_ep::kernels {

void relay_sums_nvshmem(const RelaySumsParams& p, cudaStream_t stream) {
    internode::launch_relay_sums<device::NvshmemNetwork>(p, stream);
}

}  // namespace hybrid_ep::kernels
