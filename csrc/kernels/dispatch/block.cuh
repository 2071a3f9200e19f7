// A block of dispatch: which warp does what, on one node as on several, where only the walker
// differs (one_node.cu, several_nodes.cuh).
//
// How its roles end, when all goes well and when something fails. A role that ends waits at the
// barrier at the end of run_dispatch, so no thread leaves the block before the others. And no role
// waits for one that has ended, because that one has told it:
//
//   role                ends                                         tells
//   writers             when no parcel is left                       the herald: kEnd
//   herald              at kEnd; until then it frees every parcel,
//                       also those that it cannot announce
//   walker              when no copy is left, when a peer does not   loader, storers, spreader:
//                       come, or at once if a kernel has failed      Job::kEnd, in each case
//   loader, storers,    at Job::kEnd, whatever has failed
//   spreader
//   sweepers            when the padding is zero, or at once if a
//                       kernel has failed
//   sweeper that        also when all ranks have announced the
//   announces           call, or one has not in time
//
// The walker sets `failed` if it ends early, the announcing sweeper if a rank does not announce the
// call. All threads read it behind the barrier. A block that failed is not counted as done
// (end_block), so its call stays open, and later kernels of the Buffer find the fault.
#pragma once

#include "kernels/announce.cuh"
#include "kernels/dispatch/padding.cuh"
#include "kernels/dispatch/publish.cuh"
#include "kernels/dispatch/pull.cuh"
#include "kernels/dispatch/scale.cuh"

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

// What becomes of rows that have landed: one warp, the storer, stores them. In the backward of a
// weighted combine several do, which come last (ScaleRows).
struct StoreRows {
    static constexpr int kWarps = 1, kVectorsAtOnce = 14;

    static __device__ void run(const DispatchParams& p, const Slots& slots, PullSmem& smem, int) {
        store_slices(p, slots, smem);
    }
    static __device__ const layout::RecordLayout& padded(const DispatchParams& p) {
        return p.record;
    }
};
template <typename Rows>
constexpr int kThreadsFor = kDispatchThreads + (Rows::kWarps - 1) * kWarp;

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

// The how-manieth of a dispatch's blocks.
__device__ __forceinline__ int block_of(const DispatchParams& p) {
    return int(blockIdx.x) - p.first_block;
}

// ---- the call as a whole

// The sweeper that announces the call at its beginning; this rank has ended the call before.
__device__ __forceinline__ uint64_t announce_call(const DispatchParams& p) {
    const uint32_t signature = p.record.signature();
    const uint64_t mine =
        p.behind_routing ? announcement_behind_route(p.sent.words, signature)
                         : announcement_of(p.context, Phase::kDispatch, p.sent.words, signature);
    announce(p.context, Phase::kDispatch, mine, lane_id(), kWarp);
    return mine;
}

// And before the call ends: all peers make it too, even those that I have no copy from. Invariant
// "half free": so none of them still pulls the call before, and the next call may overwrite its
// half of my outbox.
__device__ inline void await_call(const DispatchParams& p, PullSmem& smem, uint64_t epoch,
                                  uint64_t announcement) {
    if (!await_all_by_warp(p.context, Phase::kDispatch, epoch, announcement)) smem.failed = true;
}

// All threads of a block that has done its part, in the launch that pulls: the last of these blocks
// closes the call.
__device__ __forceinline__ void end_block(const Watch& watch, uint64_t epoch) {
    if (is_last_block(watch.state) && threadIdx.x == 0) {
        watch.state->parcels_taken[0] = watch.state->parcels_taken[1] = 0;
        close_call(watch.state, Phase::kDispatch, epoch);
    }
}

// ---- roles

// The whole warp: whether a kernel of this rank has failed. Asked by roles that no other role waits
// for, and by the walker, which tells those that do.
__device__ __forceinline__ bool warp_sees_fault(const DispatchParams& p) {
    return __any_sync(kAllLanes, has_fault(p.context.watch.state));
}

// The walker of a call whose routing failed: there are no copies to look at.
__device__ inline void list_nothing(PullSmem& smem) {
    if (lane_id() != 0) return;
    smem.failed = true;
    smem.job[0].num_rows = Job::kEnd;
    smem.jobs.filled(Turn{});
}

// `Walker` is made of (walker parameters, handle, PullSmem&, epoch) and lists jobs in run(), behind
// the last one Job::kEnd.
template <typename Walker, typename WalkerParams>
__device__ __forceinline__ void walk(const DispatchParams& p, const WalkerParams& walked,
                                     const layout::HandleView& handle, PullSmem& smem,
                                     uint64_t epoch) {
    if (warp_sees_fault(p)) return list_nothing(smem);
    Walker(walked, handle, smem, epoch).run();
}

__device__ inline void sweep(const DispatchParams& p, const layout::RecordLayout& record,
                             const layout::HandleView& handle, int sweeper, uint64_t epoch) {
    if (!handle.header[layout::HandleLayout::kMayHavePadding] || p.received.num_rows == 0) return;
    const Stopwatch zeroing(p.context.trace);
    zero_padding(p.received, record, handle, p.context.buffer.num_local_experts,
                 block_of(p) * kSweepers + sweeper, p.num_blocks * kSweepers);
    if (sweeper == 0 && lane_id() == 0) zeroing.note(Span::kZeroPadding, epoch);
}

// A warp: its role, from beginning to end.
template <typename Walker, typename WalkerParams, typename Rows>
__device__ __forceinline__ void play(int role, const DispatchParams& p, const WalkerParams& walked,
                                     const Rows& rows, const layout::HandleView& handle,
                                     const Slots& slots, DispatchSmem& smem, uint64_t epoch,
                                     int parcel) {
    const int nth = Rows::kWarps > 1 ? max(role - kDispatchWarps + 1, 0) : 0;  // of the storers
    if (nth > 0) role = kStorer;
    const bool announces = block_of(p) == 0 && role == kFirstSweeper;
    const uint64_t announcement = announces ? announce_call(p) : 0;
    if (role == kHerald) {
        if (publishes(p)) announce_parcels(p, smem.publish, epoch);
        return;
    }
    if (role >= first_writer(p)) {
        const int writer = role - first_writer(p);
        if (publishes(p)) {
            write_parcels<Rows::kVectorsAtOnce>(p, handle, smem.publish, writer, num_writers(p),
                                                epoch, parcel);
        }
        return;
    }

    // publishing needs what publish_routing wrote, pulling what assign_rows did
    ptx::await_kernel_before();
    // the writers beside may have read cache lines early that assign_rows has written since
    if (p.behind_routing) __threadfence();
    const Stopwatch pulling(p.context.trace);
    if (role == kWalker) {
        walk<Walker>(p, walked, handle, smem.pull, epoch);
    } else if (role == kLoader) {
        if (lane_id() == 0) load_slices(slots, smem.pull);
    } else if (role == kStorer) {
        rows.run(p, slots, smem.pull, nth);
        if (nth == 0 && lane_id() == 0) pulling.note(Span::kPullRows, epoch);
    } else if (role == kSpreader) {
        spread_trailers(p, slots, smem.pull);
    } else if (!warp_sees_fault(p)) {
        sweep(p, rows.padded(p), handle, role - kFirstSweeper, epoch);
        if (announces) await_call(p, smem.pull, epoch, announcement);
    }
}

// All threads of one of the p.num_blocks blocks. Invariant "no wait inside a grid": resident blocks
// publish all parcels, and the first one alone waits for the peers' first. False, for all threads:
// the block failed.
template <typename Walker, typename WalkerParams, typename Rows>
__device__ __forceinline__ bool run_dispatch(const DispatchParams& p, const WalkerParams& walked,
                                             const Rows& rows, char* dynamic_smem,
                                             DispatchSmem& smem) {
    const Slots slots(dynamic_smem, p.ring);
    const Watch& watch = p.context.watch;
    int parcel = 0;  // of the first writer's first lane
    if (threadIdx.x == first_writer(p) * kWarp && publishes(p)) parcel = ask_for_parcel(p);
    if (threadIdx.x == 0) {
        smem.pull.jobs.init(kJobs, Rows::kWarps + 1);  // and the spreader
        smem.pull.slots.init(slots.size(), Rows::kWarps + 1);
        smem.publish.init(num_writers(p));
        smem.pull.failed = has_fault(watch.state);
    }
    __syncthreads();
    if (smem.pull.failed) {
        if (p.behind_routing) ptx::await_kernel_before();
        return false;
    }
    const uint64_t epoch = current_epoch(watch.state, Phase::kDispatch);
    const layout::HandleView handle(p.sent.words, p.context.handle);
    play<Walker>(warp_id(), p, walked, rows, handle, slots, smem, epoch, parcel);
    if (p.behind_routing) ptx::await_kernel_before();  // or the next could overtake that one
    __syncthreads();
    return !smem.pull.failed;
}

}  // namespace hybrid_ep::kernels
