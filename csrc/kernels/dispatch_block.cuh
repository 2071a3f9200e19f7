// A block of dispatch: which warp does what, on one node as on several, where only the walker
// differs (dispatch.cu, internode_rows.cuh).
#pragma once

#include "kernels/padding.cuh"
#include "kernels/publish.cuh"
#include "kernels/pull.cuh"

namespace hybrid_ep::kernels {

// Warps: the walker looks up copies and waits until their sources have announced them; the loader
// starts all bulk loads, the storer all stores of rows that have landed, and the spreader stores
// their trailers; the writers publish and the herald announces, which takes microseconds; the
// sweepers zero the padding. All but the herald write where there is nothing to pull yet.
enum DispatchRole { kHerald, kWalker, kLoader, kStorer, kSpreader, kFirstSweeper };
constexpr int kSweepers = 2;
constexpr int kFirstWriter = kFirstSweeper + kSweepers;
constexpr int kDispatchWarps = kFirstWriter + kWriters;
constexpr int kDispatchThreads = kDispatchWarps * kWarp;

struct DispatchSmem {
    PublishSmem publish;
    PullSmem pull;
};
static_assert(sizeof(DispatchSmem) <= layout::kStaticSmemBytes);

__device__ __forceinline__ int first_writer(const DispatchParams& p) {
    return p.pulls ? kFirstWriter : kHerald + 1;
}
__device__ __forceinline__ int num_writers(const DispatchParams& p) {
    return kDispatchWarps - first_writer(p);
}

// ---- the call as a whole

// One warp of the grid, at its beginning: this rank has finished the call before.
__device__ inline void announce_arrival(const DispatchParams& p, uint64_t epoch) {
    for (int peer = lane_id(); peer < p.context.num_peers; peer += kWarp) {
        ptx::store_release(flag_in(p, peer, p.context.rank, p.context.buffer.arrival_channel()),
                           flag_value(epoch, p.record.signature()));
    }
}

// And before the call ends: all peers make it too, even those that I have no copy from. So none of
// them still pulls the call before, and the next call may overwrite its half of my outbox.
__device__ inline void await_arrivals(const DispatchParams& p, PullSmem& smem, uint64_t epoch) {
    const auto& c = p.context;
    const int channel = c.buffer.arrival_channel();
    bool good = true;
    for (int peer = lane_id(); good && peer < c.num_peers; peer += kWarp) {
        const int source = c.first_peer + peer;
        good = wait_flag(flag_in(p, c.local_rank(), source, channel), epoch, p.record.signature(),
                         c.watch, Phase::kDispatch, source, channel);
    }
    if (!good) smem.failed = true;
}

// ---- padding

__device__ inline void sweep(const DispatchParams& p, const layout::HandleView& handle, int sweeper,
                             uint64_t epoch) {
    if (!handle.header[layout::HandleLayout::kMayHavePadding]) return;
    const Stopwatch zeroing(p.context.trace);
    zero_padding(p.received, p.record, handle, p.context.buffer.num_local_experts,
                 blockIdx.x * kSweepers + sweeper, p.num_blocks * kSweepers);
    if (sweeper == 0 && lane_id() == 0) zeroing.note(Span::kZeroPadding, epoch);
}

// A role of pulling, for a call whose routing failed: there are no rows to look at.
__device__ inline void give_up(int role, PullSmem& smem) {
    if (role != kWalker || lane_id() != 0) return;
    smem.failed = true;
    smem.job[0].num_rows = Job::kEnd;
    smem.jobs.filled(Turn{});
}

// `Walker` is made of (walker parameters, handle, PullSmem&, epoch) and lists jobs in run().
template <typename Walker, typename WalkerParams>
__device__ __forceinline__ void play(int role, const DispatchParams& p, const WalkerParams& walked,
                                     const layout::HandleView& handle, const Slots& slots,
                                     DispatchSmem& smem, uint64_t epoch) {
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
        Walker(walked, handle, smem.pull, epoch).run();
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

// All threads of one of the p.num_blocks blocks. False: the call failed and stays open.
template <typename Walker, typename WalkerParams>
__device__ __forceinline__ bool run_dispatch(const DispatchParams& p, const WalkerParams& walked,
                                             char* dynamic_smem, DispatchSmem& smem) {
    const Slots slots(dynamic_smem, p.ring);
    const Watch& watch = p.context.watch;
    if (threadIdx.x == 0) {
        smem.pull.jobs.init(kJobs, kUsers);
        smem.pull.slots.init(slots.size(), kUsers);
        smem.publish.parcels.init(PublishSmem::kParcels, 1, num_writers(p));
        smem.pull.failed = has_fault(watch.state);
    }
    __syncthreads();
    if (smem.pull.failed) return false;
    const uint64_t epoch = current_epoch(watch.state, Phase::kDispatch);
    const layout::HandleView handle(p.sent.words, p.context.handle);
    play<Walker>(warp_id(), p, walked, handle, slots, smem, epoch);
    if (p.behind_routing) ptx::await_kernel_before();  // or the next could overtake that one
    __syncthreads();
    return !smem.pull.failed;
}

}  // namespace hybrid_ep::kernels
