// The kernels of several nodes over mapped memory: for tests on one host, without NVSHMEM.
#include "kernels/combine/several_nodes.cuh"
#include "kernels/dispatch/several_nodes.cuh"
#include "kernels/give_up.cuh"
#include "kernels/route/several_nodes.cuh"
#include "network/loopback_network.cuh"

namespace hybrid_ep::kernels::several_nodes {

template void launch_publish_routing<LoopbackNetwork>(const NodesContext&,
                                                      const kernels::PublishRoutingParams&,
                                                      cudaStream_t);
template void launch_dispatch<LoopbackNetwork>(const NodesContext&, const kernels::DispatchParams&,
                                               cudaStream_t);
template void launch_combine_backward<LoopbackNetwork>(const NodesContext&,
                                                       const kernels::CombineBackwardParams&,
                                                       cudaStream_t);
template void launch_combine<LoopbackNetwork>(const NodesContext&, const kernels::CombineParams&,
                                              cudaStream_t);
template void launch_give_up<LoopbackNetwork>(const NodesContext&, const uint64_t&, cudaStream_t);

}  // namespace hybrid_ep::kernels::several_nodes
