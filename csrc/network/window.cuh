// Waiting in order, between ranks of several nodes: for slots of windows to be full or free, and
// for what single tokens need.
//
// A wait for what a peer can only give once others have given theirs is longer, and looks whether
// that peer has given up: so all ranks name the rank that all of them wait for.
#pragma once

#include "device/flag.cuh"
#include "device/warp.cuh"
#include "network/context.h"

namespace hybrid_ep::network {

using namespace device;
using layout::SlotFlag;

__device__ __forceinline__ bool has_reached(const uint64_t* flag, uint64_t count) {
    return (ptx::load_acquire(flag) >> 16) >= count;
}

// For what a peer gives by itself, or for what it can only give once others have given theirs: in
// halves of the Buffer's timeout.
enum class Timeout : int {
    kForPeer = 2,
    kForOthers = 3,
    kForPassedOn = 4,  // by a rank that waits for others
};

// A wait for (flag >> 16) to reach a number.
struct Wait {
    const uint64_t* flag;
    uint64_t reached;
    uint32_t signature;
    int window;   // slots, if the flag counts uses of one of them; or what it counts
    int channel;  // the slot, or what else tells the flag from others of the peer
    Phase phase;
    int peer;
    uint64_t call;
    Timeout timeout;
    const uint64_t* verdict;  // whom the peer waited for in vain; null: it waits for none

    static constexpr int kCalls = 0, kReads = -1, kEveryOtherCall = -2;
};

enum class Look { kNotYet, kThere, kFailed };

// One thread; acquires what was written before the flag was set (for bulk copies of it, add
// fence_proxy_async).
__device__ inline Look look(const NodesContext& context, const Wait& wait) {
    const uint64_t seen = ptx::load_acquire(wait.flag);
    if ((seen >> 16) < wait.reached) return Look::kNotYet;
    if (wait.signature == kAnySignature || (seen >> 16) > wait.reached ||
        (seen & 0xFFFF) == wait.signature) {
        return Look::kThere;
    }
    report_fault(context.world.watch, FaultKind::kOtherCall, wait.phase, wait.peer, wait.channel,
                 wait.call, wait.call << 16);
    return Look::kFailed;
}

// Keeps the deadline of the waits of a warp or thread; asked between polls.
class Deadline {
  public:
    __device__ explicit Deadline(const NodesContext& context) : context_(context) {}

    // False: give up, `wait` has been reported or another thread had cause to.
    __device__ bool go_on(const Wait& wait) {
        if (++polls_ % kPollsPerClock != 0) return true;
        const Watch& watch = context_.world.watch;
        const uint64_t now = ptx::global_timer_ns();
        if (start_ == 0) start_ = now;
        if (has_fault(watch.state)) return false;
        const uint64_t verdict = wait.verdict != nullptr ? ptx::load_acquire(wait.verdict) : 0;
        const bool too_late = now - start_ > watch.timeout_ns / 2 * int(wait.timeout);
        int peer = verdict != 0 ? int(verdict >> 16) - 1 : wait.peer;
        // That peer waited for me in vain, or for nobody: its fault names a token.
        const int num_ranks = context_.world.buffer.num_ranks;
        if (peer == context_.world.rank || peer >= num_ranks) peer = wait.peer;
        // What that peer says itself tells more than that it does not come.
        const bool looks = verdict != 0 || too_late || polls_ % (17 * kPollsPerClock) == 0;
        if (looks && will_not_come(watch, wait.phase, peer, wait.channel, wait.call)) return false;
        if (verdict == 0 && !too_late) return true;
        const FaultKind kind = verdict != 0 ? FaultKind::kAwaitedInVain : FaultKind::kTimeout;
        report_fault(watch, kind, wait.phase, peer, wait.channel, wait.call, last_call(wait) << 16);
        return false;
    }
    __device__ void restart() { polls_ = 0, start_ = 0; }

  private:
    // Odd and no multiple of 3, and so is 17 times as many: of two or three waits that a loop asks
    // for in turn, each is looked at. About kPollsPerLook.
    static constexpr uint32_t kPollsPerClock = 61;

    // That the flag tells of.
    __device__ uint64_t last_call(const Wait& wait) const {
        const uint64_t seen = ptx::load_acquire(wait.flag) >> 16;
        switch (wait.window) {
            case Wait::kCalls:
                return seen;
            case Wait::kReads:
                return wait.call - 1;
            case Wait::kEveryOtherCall:
                return max(int64_t(wait.call - 2 * (wait.reached - seen)), int64_t(0));
            default:
                return context_.nodes.call_of({wait.channel, seen}, wait.window);
        }
    }

    const NodesContext& context_;
    uint64_t start_ = 0;
    uint32_t polls_ = 0;
};

// The warp: what a rank tells its node by announce(), to its rail peers.
template <typename Network>
__device__ void announce_to_rail(const NodesContext& context, const Network& network,
                                 uint64_t announcement) {
    const int64_t mine =
        context.nodes.buffer.announced(context.world.rank, layout::verb_of(announcement));
    for (int node = lane_id(); node < context.nodes.num_nodes; node += kWarp) {
        if (node == context.node) continue;
        network.signal({context.flag_at(mine), announcement}, context.rail_peer(node));
    }
}

// The warp, having given up: rail peers who wait for what comes after raise the same name.
template <typename Network>
__device__ void tell_verdict(const NodesContext& context, const Network& network) {
    if (lane_id() != 0) return;
    const auto* fault = static_cast<const volatile Fault*>(context.world.watch.fault);
    while (fault->kind == 0) continue;  // the first thread is writing it
    uint64_t* verdict = context.flag_at(context.nodes.verdict_flag(context.node));
    const uint64_t peer = uint64_t(fault->peer + 1) << 16;
    for (int node = 0; node < context.nodes.num_nodes; ++node) {
        if (node == context.node) continue;
        network.signal({verdict, peer}, context.rail_peer(node));
        // as if that rail peer had told: my node waits for me to pass on what it sends
        ptx::store_relaxed(context.flag_at(context.nodes.verdict_flag(node)), peer);
    }
}

// One thread. False: give up.
__device__ inline bool await(const NodesContext& context, const Wait& wait) {
    Deadline deadline(context);
    while (true) {
        const Look seen = look(context, wait);
        if (seen != Look::kNotYet) return seen == Look::kThere;
        if (!deadline.go_on(wait)) return false;
    }
}

// The whole warp, after waits in some of its lanes: whether all may go on. What the waits acquired
// is then visible to all lanes, for bulk copies too.
__device__ __forceinline__ bool all_lanes(bool good) {
    good = __all_sync(kAllLanes, good);
    ptx::fence_proxy_async();
    return good;
}

// The whole warp: `use(lanes)` for the lanes that have a wait as soon as it is over, in the order
// of lanes. Invariant "chunks in order": so no warp holds back what others need while it waits for
// what they have. False: give up.
template <typename Use>
__device__ bool in_order(const NodesContext& context, bool has_wait, const Wait& wait, Use use) {
    uint32_t left = __ballot_sync(kAllLanes, has_wait);
    while (left != 0) {
        const bool asks = left >> lane_id() & 1;
        const Look seen = asks ? look(context, wait) : Look::kThere;
        uint32_t held = __ballot_sync(kAllLanes, seen != Look::kThere);
        if (held & 1u << (__ffs(left) - 1)) {  // the first one: then nothing can be used
            bool good = true;
            if (lane_id() == __ffs(left) - 1) good = await(context, wait);
            if (!all_lanes(good)) return false;
            held &= ~(1u << (__ffs(left) - 1));
        }
        const uint32_t now = held == 0 ? left : left & ((held & -held) - 1);
        ptx::fence_proxy_async();
        use(now);
        left &= ~now;
    }
    return true;
}

}  // namespace hybrid_ep::network
