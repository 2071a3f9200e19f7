// Slots of windows: waiting for one to be full or free, and handing it on.
//
// A slot's flag holds (use << 16) | signature of the call, or, once its writer has given up, whom
// that one waited for: so the rank that everybody waits for is named by everybody.
#pragma once

#include "device/flag.cuh"
#include "device/warp.cuh"
#include "kernels/internode.h"

namespace hybrid_ep::device {

using kernels::NodeContext;
using layout::Slot;
using layout::Turn;

constexpr uint64_t kGivenUp = 1ull << 63;

__device__ __forceinline__ uint64_t given_up(int peer) { return kGivenUp | uint64_t(peer) << 16; }

__device__ __forceinline__ bool has_reached(const uint64_t* flag, uint64_t use) {
    return (ptx::load_acquire(flag) >> 16) >= use;
}

// How long: for what a peer owes by itself, or for what it can only give once others have given
// theirs. The latter waits longer, so that the rank at fault is named by those who wait for it.
enum class Patience : int { kForPeer = 2, kForOthers = 3 };  // halves of the deadline

// A wait for one use of a slot, as far as it needs to be named.
struct SlotWait {
    const uint64_t* flag;
    Turn turn;
    uint32_t signature;  // kAnySignature: not looked at
    Phase phase;
    int peer;
    uint64_t call;
    Patience patience;

    static constexpr uint32_t kAnySignature = 0x10000;
};

// Keeps the deadline of the waits of a warp or thread; asked between polls.
class Deadline {
  public:
    __device__ explicit Deadline(const NodeContext& context) : context_(context) {}

    // False: give up, `wait` has been reported or another thread had cause to.
    __device__ bool go_on(const SlotWait& wait) {
        if (++polls_ % 64 != 0) return true;
        const Watch& watch = context_.world.watch;
        const uint64_t now = ptx::global_timer_ns();
        if (start_ == 0) start_ = now;
        if (has_fault(watch.state)) return false;
        if (now - start_ <= watch.timeout_ns / 2 * int(wait.patience)) return true;
        const uint64_t seen = ptx::load_acquire(wait.flag);
        const uint64_t last = context_.relay.call_of({wait.turn.slot, seen >> 16});
        report_fault(watch, FaultKind::kTimeout, wait.phase, wait.peer, wait.turn.slot, wait.call,
                     last << 16);
        return false;
    }
    __device__ void restart() { polls_ = 0, start_ = 0; }

  private:
    const NodeContext& context_;
    uint64_t start_ = 0;
    uint32_t polls_ = 0;
};

// Waits until the slot's flag has reached the use. Any single thread; acquires what was written
// before it (for bulk copies of it, add fence_proxy_async). False: give up.
__device__ inline bool wait_slot(const NodeContext& context, const SlotWait& wait) {
    Deadline deadline(context);
    uint64_t seen = ptx::load_acquire(wait.flag);
    while ((seen >> 16) < wait.turn.use) {
        if (!deadline.go_on(wait)) return false;
        seen = ptx::load_acquire(wait.flag);
    }
    const Watch& watch = context.world.watch;
    if (seen & kGivenUp) {
        const int peer = int(seen >> 16 & 0xFFFF);
        report_fault(watch, FaultKind::kTimeout, wait.phase, peer, wait.turn.slot, wait.call, 0);
        return false;
    }
    if (wait.signature != SlotWait::kAnySignature && (seen >> 16) == wait.turn.use &&
        (seen & 0xFFFF) != wait.signature) {
        report_fault(watch, FaultKind::kOtherCall, wait.phase, wait.peer, wait.turn.slot, wait.call,
                     wait.call << 16);
        return false;
    }
    return true;
}

// The warp, after a wait in some of its lanes: whether all may go on. What the waits acquired is
// then visible to all lanes, for bulk copies too.
__device__ __forceinline__ bool all_lanes(bool good) {
    good = __all_sync(0xFFFFFFFFu, good);
    ptx::fence_proxy_async();
    return good;
}

// The warp, after its last access to a slot: one flag in mapped memory.
__device__ __forceinline__ void mark_slot(uint64_t* flag, const Turn& turn, uint32_t signature) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_id() == 0) ptx::store_release(flag, flag_value(turn.use, signature));
}

// The number of a warp among those of a role's blocks: chunks that follow each other are dealt to
// other blocks, so to other SMs and queue pairs.
__device__ __forceinline__ int warp_of_role(int block, int num_blocks) {
    return warp_id() * num_blocks + block;
}

// The n-th (from 0) set bit of a word that has as many.
__device__ __forceinline__ int nth_bit(uint32_t word, int n) {
    for (; n > 0; --n) word &= word - 1;
    return __ffs(word) - 1;
}

// The warp: rows of a chunk that `wanted` has a bit for go to the same places of the rail peer's
// slot, then its flag is set. Rows that follow each other go together.
template <typename Network>
__device__ void put_rows(const Network& network, uint32_t wanted, char* to, const char* from,
                         int stride, int row_bytes, uint64_t* flag, uint64_t value, int rank) {
    if (wanted == 0) {
        if (lane_id() == 0) network.signal(flag, value, rank);
        return;
    }
    const bool dense = stride - row_bytes < 128;
    for (bool first = true; wanted != 0; first = false) {
        const int begin = __ffs(wanted) - 1;
        const uint32_t gap = ~(wanted >> begin);
        const int run = !dense ? 1 : gap == 0 ? kWarp : __ffs(gap) - 1;
        wanted &= run + begin == kWarp ? (1u << begin) - 1 : ~(((1u << run) - 1) << begin);
        const int64_t offset = int64_t(begin) * stride,
                      bytes = int64_t(run - 1) * stride + row_bytes;
        const bool last = wanted == 0;
        if (last && !first) {
            if (lane_id() == 0) network.fence();
            __syncwarp();
        }
        network.put_warp(to + offset, from + offset, bytes, rank, last ? flag : nullptr, value);
    }
}

}  // namespace hybrid_ep::device
