#include <nvshmem.h>

#include "kernels/launch.cuh"
#include "kernels/several_nodes.h"

namespace hybrid_ep::kernels::several_nodes {
namespace {

struct Nothing {};

__global__ void quiet(Nothing) { nvshmem_quiet(); }

}  // namespace

void complete_puts() {
    launch(kKernel<quiet>, {}, 1, 1, 0, nullptr);
    check_cuda(cudaDeviceSynchronize(), "waiting for puts");
}

}  // namespace hybrid_ep::kernels::several_nodes
