#include "kernels/combine/several_nodes.cuh"
#include "network/nvshmem_network.cuh"

namespace hybrid_ep::kernels::several_nodes {

template void launch_combine<NvshmemNetwork>(const NodesContext&, const kernels::CombineParams&,
                                             cudaStream_t);

}  // namespace hybrid_ep::kernels::several_nodes
