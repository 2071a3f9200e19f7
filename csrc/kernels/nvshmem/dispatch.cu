#include "kernels/dispatch/several_nodes.cuh"
#include "network/nvshmem_network.cuh"

namespace hybrid_ep::kernels::several_nodes {

template void launch_dispatch<NvshmemNetwork>(const NodesContext&, const kernels::DispatchParams&,
                                              cudaStream_t);
template void launch_combine_backward<NvshmemNetwork>(const NodesContext&,
                                                      const kernels::CombineBackwardParams&,
                                                      cudaStream_t);

}  // namespace hybrid_ep::kernels::several_nodes
