// What the link carries and nothing else: the bench holds dispatch and combine against it.
//
//   pull   inbox of the peer --TMA load over NVLink--> stage --TMA store--> my inbox
//   push   my inbox --TMA load--> stage --TMA store over NVLink--> inbox of the peer
//
// Sources are the first halves of the inboxes, targets the second. The pieces, the ring and the
// grid are those of dispatch, one store a load: so a difference to this is what dispatch itself
// costs. No flag is set and none waited for: the caller keeps all ranks out of other calls.
#include "device/ring.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;

struct CopyPieces {
    const CopyPeerParams& p;
    int64_t stride;  // bytes from a warp's piece to its next
    int64_t loading, storing;

    __device__ uint32_t bytes_at(int64_t begin) const {
        return uint32_t(min(int64_t(p.ring.stage_bytes), p.num_bytes - begin));
    }

    __device__ bool load(Ring& ring) {
        if (loading >= p.num_bytes) return false;
        const uint32_t bytes = bytes_at(loading);
        ring.expect(bytes);
        if (lane_id() == 0) {
            ptx::bulk_load(ring.load_stage(), p.from + loading, bytes, ring.load_barrier());
        }
        loading += stride;
        ring.advance_load();
        return true;
    }

    __device__ void work(const char* stage) {
        if (lane_id() == 0) ptx::bulk_store(p.to + storing, stage, bytes_at(storing));
        storing += stride;
    }
};

__global__ void __launch_bounds__(layout::kMaxRingWarps* kWarp)
    copy_peer(const __grid_constant__ CopyPeerParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    const int64_t warp = blockIdx.x * warps_per_block() + warp_id();
    const int64_t first = warp * p.ring.stage_bytes;
    Ring ring(dynamic_smem, p.ring);
    CopyPieces role{p, int64_t(gridDim.x) * warps_per_block() * p.ring.stage_bytes, first, first};
    ring.run(role);
}

}  // namespace

void launch_copy_peer(const CopyPeerParams& p, cudaStream_t stream) {
    launch(copy_peer, p, p.num_blocks, p.ring.num_warps * kWarp, p.ring.smem_bytes(), stream);
}

}  // namespace hybrid_ep::kernels
