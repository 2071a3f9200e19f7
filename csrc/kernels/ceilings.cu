// What the link carries and nothing else: the bench holds dispatch and combine against it.
//
//   pull   outbox of the peer --TMA load over NVLink--> slot --TMA store--> my outbox
//   push   my outbox --TMA load--> slot --TMA store over NVLink--> outbox of the peer
//
// Sources are the first halves of the outboxes, targets the second. The pieces, the ring and the
// grid are those of dispatch, one store per load: so a difference to this is what dispatch itself
// costs. No flag is set and none waited for: the caller keeps all ranks out of other calls.
#include "device/ring.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;

constexpr int kThreads = 2 * kWarp;
constexpr int kStoresInFlight = 4;  // slots

// The block's pieces of the copy, one after the other.
struct Pieces {
    const CopyPeerParams& p;
    int64_t begin;

    __device__ Pieces(const CopyPeerParams& params)
        : p(params), begin(int64_t(blockIdx.x) * p.ring.slot_bytes) {}
    __device__ bool more() const { return begin < p.num_bytes; }
    __device__ uint32_t bytes() const {
        return uint32_t(min(int64_t(p.ring.slot_bytes), p.num_bytes - begin));
    }
    __device__ void advance() { begin += int64_t(gridDim.x) * p.ring.slot_bytes; }
};

__device__ void load_pieces(const CopyPeerParams& p, const Slots& slots, SlotHandover& handover) {
    Turn turn;
    for (Pieces piece(p); piece.more(); piece.advance(), turn.advance(slots.size())) {
        handover.await_free(turn);
        handover.filled_by(turn, piece.bytes());
        ptx::bulk_load(slots.bytes(turn.at), p.from + piece.begin, piece.bytes(),
                       handover.barrier(turn));
    }
}

__device__ void store_pieces(const CopyPeerParams& p, const Slots& slots, SlotHandover& handover) {
    Turn turn, oldest;
    int in_flight = 0;
    for (Pieces piece(p); piece.more(); piece.advance(), turn.advance(slots.size())) {
        handover.await_filled(turn);
        ptx::bulk_store(p.to + piece.begin, slots.bytes(turn.at), piece.bytes());
        ptx::bulk_commit();
        if (++in_flight <= kStoresInFlight) continue;
        ptx::bulk_wait_read<kStoresInFlight>();
        handover.freed(oldest.at);
        oldest.advance(slots.size());
    }
    ptx::bulk_wait_written<0>();
}

__global__ void __launch_bounds__(kThreads) copy_peer(const __grid_constant__ CopyPeerParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ SlotHandover handover;
    const Slots slots(dynamic_smem, p.ring);
    if (threadIdx.x == 0) handover.init(slots.size(), 1);
    __syncthreads();
    if (lane_id() != 0) return;
    if (warp_id() == 0) {
        load_pieces(p, slots, handover);
    } else {
        store_pieces(p, slots, handover);
    }
}

}  // namespace

void launch_copy_peer(const CopyPeerParams& p, cudaStream_t stream) {
    launch(kKernel<copy_peer>, p, p.num_blocks, kThreads, layout::dynamic_smem_bytes(p.ring, 1),
           stream);
}

}  // namespace hybrid_ep::kernels
