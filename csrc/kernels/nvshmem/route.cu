#include "kernels/give_up.cuh"
#include "kernels/route/several_nodes.cuh"
#include "network/nvshmem_network.cuh"

namespace hybrid_ep::kernels::several_nodes {

template void launch_publish_routing<NvshmemNetwork>(const NodesContext&,
                                                     const kernels::PublishRoutingParams&,
                                                     cudaStream_t);
template void launch_give_up<NvshmemNetwork>(const NodesContext&, const uint64_t&, cudaStream_t);

}  // namespace hybrid_ep::kernels::several_nodes
