// Dispatch, in one kernel: my tokens become readable for my peers, and every copy that is mine is
// pulled once and lands in all its rows.
//
//   publish   x[t], scales, weights --> outbox record [row | scales | weights], parcel by parcel;
//             a flag in every peer announces the parcel
//   pull      outbox record of the source --TMA load over NVLink--> slot
//             slot --TMA stores--> rows[row_i], weights[row_i], scales[row_i]
//
// Publishing and pulling are done by different warps of each block and do not wait for each other,
// so no two ranks ever do. Only tokens that go to a peer are published, others come from x; but
// where the copy engine publishes, it has begun before this kernel, with all rows from a token on.
// The two may also be two launches, with the host's wait for the number of rows between them.
#include "kernels/kernels.h"
#include "kernels/launch.cuh"
#include "kernels/padding.cuh"
#include "kernels/publish.cuh"
#include "kernels/pull.cuh"

namespace hybrid_ep::kernels {
namespace {

// Warps: the walker looks up copies and waits until their sources have announced them; the loader
// starts all bulk loads, the storer all stores of rows that have landed, and the spreader stores
// their trailers; the writers publish and the herald announces, which takes microseconds; the
// sweepers zero the padding. All but the herald write where there is nothing to pull yet.
enum Role { kHerald, kWalker, kLoader, kStorer, kSpreader, kFirstSweeper };
constexpr int kSweepers = 2;
constexpr int kFirstWriter = kFirstSweeper + kSweepers;
constexpr int kWarps = kFirstWriter + kWriters;
constexpr int kThreads = kWarps * kWarp;

struct Smem {
    PublishSmem publish;
    PullSmem pull;
};
static_assert(sizeof(Smem) <= layout::kStaticSmemBytes);

__device__ __forceinline__ int first_writer(const DispatchParams& p) {
    return p.pulls ? kFirstWriter : kHerald + 1;
}
__device__ __forceinline__ int num_writers(const DispatchParams& p) {
    return kWarps - first_writer(p);
}

// ---- the call as a whole

// One warp of the grid, at its beginning: this rank has finished the call before.
__device__ void announce_arrival(const DispatchParams& p, uint64_t epoch) {
    const auto& b = p.context.buffer;
    for (int peer = lane_id(); peer < b.num_ranks; peer += kWarp) {
        ptx::store_release(flag_in(p, peer, p.context.rank, b.arrival_channel()),
                           flag_value(epoch, p.record.signature()));
    }
}

// And before the call ends: all peers make it too, even those that I have no copy from. So none of
// them still pulls the call before, and the next call may overwrite its half of my outbox.
__device__ void await_arrivals(const DispatchParams& p, PullSmem& smem, uint64_t epoch) {
    const auto& b = p.context.buffer;
    bool good = true;
    for (int peer = lane_id(); good && peer < b.num_ranks; peer += kWarp) {
        good = wait_flag(flag_in(p, p.context.rank, peer, b.arrival_channel()), epoch,
                         p.record.signature(), p.context.watch, Phase::kDispatch, peer,
                         b.arrival_channel());
    }
    if (!good) smem.failed = true;
}

// ---- padding

__device__ void sweep(const DispatchParams& p, const layout::HandleView& handle, int sweeper,
                      uint64_t epoch) {
    if (!handle.header[layout::HandleLayout::kMayHavePadding]) return;
    const Stopwatch zeroing(p.context.trace);
    zero_padding(p.rows, p.record, handle, p.context.buffer.num_local_experts,
                 blockIdx.x * kSweepers + sweeper, gridDim.x * kSweepers);
    if (sweeper == 0 && lane_id() == 0) zeroing.note(Span::kZeroPadding, epoch);
}

// A role of pulling, for a call whose routing failed: there are no rows to look at.
__device__ void give_up(int role, PullSmem& smem) {
    if (role != kWalker || lane_id() != 0) return;
    smem.failed = true;
    smem.job[0].num_rows = Job::kEnd;
    smem.jobs.filled(Turn{});
}

__device__ __forceinline__ void play(int role, const DispatchParams& p,
                                     const layout::HandleView& handle, const Slots& slots,
                                     Smem& smem, uint64_t epoch) {
    const bool is_first_sweeper = blockIdx.x == 0 && role == kFirstSweeper;
    if (is_first_sweeper) announce_arrival(p, epoch);
    if (role == kHerald) {
        if (publishes(p)) announce_parcels(p, smem.publish, epoch);
        return;
    }
    if (role >= first_writer(p)) {
        const int writer = role - first_writer(p);
        if (publishes(p)) write_parcels(p, handle, smem.publish, writer, num_writers(p), epoch);
        return;
    }

    // publishing needs what publish_routing wrote, pulling what assign_rows did
    ptx::await_kernel_before();
    // the writers beside may have read cache lines early that assign_rows has written since
    if (p.behind_routing) __threadfence();
    if (has_fault(p.context.watch.state)) return give_up(role, smem.pull);
    const Stopwatch pulling(p.context.trace);
    if (role == kWalker) {
        Walker(p, handle, smem.pull, epoch).run();
    } else if (role == kLoader) {
        if (lane_id() == 0) load_slices(slots, smem.pull);
    } else if (role == kStorer) {
        store_slices(p, slots, smem.pull);
        if (lane_id() == 0) pulling.note(Span::kPullRows, epoch);
    } else if (role == kSpreader) {
        spread_trailers(p, slots, smem.pull);
    } else {
        sweep(p, handle, role - kFirstSweeper, epoch);
        if (is_first_sweeper) await_arrivals(p, smem.pull, epoch);
    }
}

__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    const Slots slots(dynamic_smem, p.ring);
    const Watch& watch = p.context.watch;
    if (threadIdx.x == 0) {
        smem.pull.jobs.init(kJobs, kUsers);
        smem.pull.slots.init(slots.size(), kUsers);
        smem.publish.parcels.init(PublishSmem::kParcels, 1, num_writers(p));
        smem.pull.failed = has_fault(watch.state);
    }
    __syncthreads();
    if (smem.pull.failed) return;
    const uint64_t epoch = current_epoch(watch.state, Phase::kDispatch);
    const layout::HandleView handle(p.words, p.context.handle);
    play(warp_id(), p, handle, slots, smem, epoch);
    if (p.behind_routing) ptx::await_kernel_before();  // or the next could overtake that one
    __syncthreads();
    if (p.pulls && !smem.pull.failed && is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kDispatch, epoch);
    }
}

}  // namespace

void launch_dispatch(const DispatchParams& p, cudaStream_t stream) {
    const auto launch_it =
        p.behind_routing ? launch_behind_ours<DispatchParams> : launch<DispatchParams>;
    launch_it(dispatch, p, p.num_blocks, kThreads, layout::dynamic_smem_bytes(p.ring, 1), stream);
}

}  // namespace hybrid_ep::kernels
