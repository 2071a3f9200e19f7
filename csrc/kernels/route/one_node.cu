// Every rank tells every rank which experts its tokens chose.
//
//   topk_idx [T, K] --distinct, ascending--> experts [T, K] int16 --push--> routing inbox of all
//                   --count per tile-------> rows per expert, copies ---push---^
//                   `--> the home half of the handle: ranks per token, top-k slot -> place
//
// A block owns tiles of kTileTokens tokens. All max_tokens are published, tokens beyond T as
// having no expert, so T is free to differ.
#include "device/flag.cuh"
#include "device/trace.cuh"
#include "kernels/announce.cuh"
#include "kernels/launch.cuh"
#include "kernels/route/tile.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using namespace routing;
using layout::Phase;

__global__ void __launch_bounds__(kThreads) publish_routing(const PublishRoutingParams p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    const auto& b = p.context.buffer;
    ptx::let_next_kernel_start();
    if (__syncthreads_or(has_fault(p.context.watch.state))) return;
    const uint64_t epoch = current_epoch(p.context.watch.state, Phase::kRoute);
    TileSmem smem(dynamic_smem, b);
    const Stopwatch stopwatch(p.context.trace);
    if (blockIdx.x == 0 && warp_id() == 0) {
        announce_route(p.context, p.words, p.choices, epoch);
    }

    for (int tile = blockIdx.x; tile < b.num_tiles; tile += gridDim.x) {
        clear_tile(b, smem);
        sort_tokens(p, smem, tile, epoch);
        __syncthreads();
        push_tile(smem, b, p.context.peers, 0, b.num_ranks, p.context.rank, tile, epoch);
        __syncthreads();
    }
    signal_all_ranks(p.context.peers, b, Phase::kRoute, p.context.rank, blockIdx.x, epoch,
                     b.topk & 0xFFFF);
    stopwatch.stop(Span::kPublishRouting, epoch);
}

}  // namespace

void launch_publish_routing(const PublishRoutingParams& p, cudaStream_t stream) {
    launch(kKernel<publish_routing>, p, p.num_blocks, kThreads, TileSmem::bytes(p.context.buffer),
           stream);
}

}  // namespace hybrid_ep::kernels
