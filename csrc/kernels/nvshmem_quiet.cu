#include <nvshmem.h>

#include "kernels/nvshmem.h"

namespace hybrid_ep::kernels {
namespace {

__global__ void quiet() { nvshmem_quiet(); }

}  // namespace

void launch_quiet_nvshmem(cudaStream_t stream) { quiet<<<1, 1, 0, stream>>>(); }

}  // namespace hybrid_ep::kernels
