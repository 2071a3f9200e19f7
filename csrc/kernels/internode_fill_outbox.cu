// My tokens become readable for my node, and for the network: x, scales and weights -> records of
// my outbox.
//
//   x[t] --TMA load--> stage --TMA store--> outbox record [row | scales | weights]
//
// Warps take tokens in turn. Weights are stored by place (the order of the token's distinct
// experts), those of repeated experts added, because that is how the peers' rows refer to them.
#include "device/flag.cuh"
#include "device/trace.cuh"
#include "device/warp_ring.cuh"
#include "kernels/internode.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using layout::Phase;
using layout::SliceLayout;

// Where the warp is in its sequence of (token, slice).
struct TokenCursor {
    int64_t token;
    int slice = 0;

    __device__ void advance(int num_slices, int num_warps) {
        if (++slice == num_slices) {
            slice = 0;
            token += num_warps;
        }
    }
};

struct FillOutbox {
    const FillOutboxParams& p;
    SliceLayout slices;
    int num_warps;
    uint64_t epoch;
    TokenCursor loading, storing;

    __device__ int bytes_of(int slice) const {
        return min(slices.slice_bytes, p.record.row_bytes - slice * slices.slice_bytes);
    }

    __device__ bool load(WarpRing& ring) {
        if (loading.token >= p.tokens.count) return false;
        const int slice = loading.slice, bytes = bytes_of(slice);
        ring.expect(bytes);
        if (lane_id() == 0) {
            ptx::bulk_load(
                ring.load_stage(),
                p.tokens.x + loading.token * p.tokens.x_stride + slice * slices.slice_bytes, bytes,
                ring.load_barrier());
        }
        if (slice == slices.num_slices - 1) load_trailer(ring.load_stage() + bytes);
        loading.advance(slices.num_slices, num_warps);
        ring.advance_load();
        return true;
    }

    __device__ void load_trailer(char* trailer) const {
        const char* scales = p.tokens.scales + loading.token * p.tokens.scales_stride;
        for (int i = lane_id(); i < p.record.scale_bytes; i += kWarp) trailer[i] = scales[i];
        if (p.record.weight_bytes == 0) return;
        const int topk = p.context.relay.world.topk;
        layout::HandleView handle(p.words, p.context.world.handle);
        float weight = 0.f;
        int place = -1;
        if (lane_id() < topk) {
            weight = p.tokens.weights[loading.token * p.tokens.weights_stride + lane_id()];
            place = handle.places[loading.token * topk + lane_id()];
        }
        float sum = 0.f;
        for (int slot = 0; slot < topk; ++slot) {
            float other = __shfl_sync(0xFFFFFFFFu, weight, slot);
            if (__shfl_sync(0xFFFFFFFFu, place, slot) == lane_id()) sum = __fadd_rn(sum, other);
        }
        auto* weights = reinterpret_cast<float*>(trailer + p.record.weights_offset() -
                                                 p.record.scales_offset());
        if (lane_id() < topk) weights[lane_id()] = sum;
    }

    __device__ void work(const char* stage) {
        const int slice = storing.slice;
        int bytes = bytes_of(slice);
        if (slice == slices.num_slices - 1) {
            bytes += p.record.trailer_bytes();
            ptx::fence_proxy_async_smem();  // the trailer was written by ordinary stores
            __syncwarp();
        }
        if (lane_id() == 0) {
            char* record = p.context.at(p.context.relay.world.record(epoch, storing.token));
            ptx::bulk_store(record + slice * slices.slice_bytes, stage, bytes);
        }
        storing.advance(slices.num_slices, num_warps);
    }
};

// The whole block, after its last bulk store: tells my node's ranks that it has finished.
__device__ void signal_node(const NodeContext& c, uint64_t epoch, uint32_t signature) {
    ptx::fence_proxy_async();
    __syncthreads();
    for (int peer = threadIdx.x; peer < c.relay.ranks_per_node; peer += blockDim.x) {
        ptx::store_release(c.peer_flag(peer, c.relay.published_flag(c.local_rank, blockIdx.x)),
                           flag_value(epoch, signature));
    }
}

__global__ void __launch_bounds__(layout::WarpRingShape::kMoveWarps* kWarp, 1)
    fill_outbox(const __grid_constant__ FillOutboxParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    if (has_fault(p.context.world.watch.state)) return;
    const uint64_t epoch = current_epoch(p.context.world.watch.state, Phase::kDispatch);
    const int warp = blockIdx.x * warps_per_block() + warp_id();

    const Stopwatch stopwatch(p.context.world.trace);
    WarpRing ring(dynamic_smem, p.ring);
    FillOutbox role{p, p.slices, int(gridDim.x) * warps_per_block(), epoch, {warp}, {warp}};
    ring.run(role);
    signal_node(p.context, epoch, p.record.signature());
    stopwatch.stop(Span::kPublishRows, epoch);
}

}  // namespace

void launch_fill_outbox(const FillOutboxParams& p, cudaStream_t stream) {
    launch(fill_outbox, p, p.num_blocks, p.ring.num_warps * kWarp, p.ring.smem_bytes(), stream);
}

}  // namespace hybrid_ep::kernels
