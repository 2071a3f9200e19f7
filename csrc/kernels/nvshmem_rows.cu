#include "device/nvshmem_network.cuh"
#include "kernels/internode_rows.cuh"
#include "kernels/nvshmem.h"

namespace hybrid_ep::kernels {

void relay_rows_nvshmem(const RelayRowsParams& p, cudaStream_t stream) {
    internode::launch_relay_rows<device::NvshmemNetwork>(p, stream);
}

}  // namespace hybrid_ep::kernels
