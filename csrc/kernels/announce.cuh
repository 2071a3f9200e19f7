// Who announces verbs to whom: the ranks of a node to each other, and rail peers, whose words a
// rank passes on to its node. So every rank sees the announcement of every other.
#pragma once

#include "device/flag.cuh"
#include "device/warp.cuh"
#include "kernels/kernels.h"

namespace hybrid_ep::kernels {

using namespace device;

__device__ __forceinline__ uint64_t* announced_in(const Context& c, int local_rank, int source,
                                                  uint64_t announcement) {
    return reinterpret_cast<uint64_t*>(c.peers.base[local_rank] +
                                       c.buffer.announced(source, layout::verb_of(announcement)));
}

// Threads from `first` on, each the `step`-th peer: tells the ranks of my node, me among them. By
// stream order this rank has ended the verb before.
__device__ inline void announce(const Context& c, Phase phase, uint64_t announcement, int first,
                                int step) {
    if (first == 0) remember_announcement(c.watch, phase, announcement);
    for (int peer = first; peer < c.num_peers; peer += step) {
        ptx::store_release(announced_in(c, peer, c.rank, announcement), announcement);
    }
}

// One thread. False: another verb than mine, or give up.
__device__ inline bool is_as_mine(const Context& c, const Awaited& a, uint64_t theirs) {
    if (layout::belong_together(theirs, a.mine)) return true;
    if (theirs == layout::nothing_announced(a.mine)) {  // the first to find out has reported it
        report_fault(c.watch, FaultKind::kTimeout, a.phase, a.source, 0, a.epoch,
                     (a.epoch - 1) << 16);
    } else if (theirs != 0) {
        report_fault(c.watch, FaultKind::kOtherCall, a.phase, a.source, 0, a.epoch, theirs, a.mine);
    }
    return false;
}

// The threads that announced: until the ranks of my node and my rail peers make this verb too.
// Invariant "owner passes on": what rail peers announce goes on to my node, also that one announces
// nothing. False: give up.
__device__ inline bool await_peers(const Context& c, Phase phase, uint64_t epoch,
                                   uint64_t announcement, int first, int step) {
    const int num_nodes = c.buffer.num_ranks / c.num_peers;
    bool good = true;
    for (int i = first; good && i < c.num_peers + num_nodes; i += step) {
        const int node = i - c.num_peers;
        const int source = node < 0 ? c.first_peer + i : node * c.num_peers + c.local_rank();
        if (node >= 0 && source == c.rank) continue;
        const Awaited a{phase, epoch, announcement, source, source, c.watch.timeout_ns};
        const uint64_t theirs = await_announced(c.watch, a);
        for (int peer = 0; node >= 0 && theirs != 0 && peer < c.num_peers; ++peer) {
            if (peer == c.local_rank()) continue;
            ptx::store_release(announced_in(c, peer, source, announcement), theirs);
        }
        good = is_as_mine(c, a, theirs);
    }
    return good;
}

// The same threads, once all of them have seen their peers: until all other ranks make this verb
// too. A rank of my node passes their words on when it has them, so this waits half as long again
// and names that rank.
__device__ inline bool await_others(const Context& c, Phase phase, uint64_t epoch,
                                    uint64_t announcement, int first, int step) {
    bool good = true;
    for (int source = first; good && source < c.buffer.num_ranks; source += step) {
        const int through = c.first_peer + source % c.num_peers;
        const Awaited a{phase, epoch, announcement, source, through, c.watch.timeout_ns / 2 * 3};
        good = is_as_mine(c, a, await_announced(c.watch, a));
    }
    return good;
}

__device__ __forceinline__ bool has_others(const Context& c) {
    return c.num_peers > 1 && c.num_peers < c.buffer.num_ranks;
}

// The whole warp, or the whole block: until all ranks make this verb too, which is the invariant
// "calls in step". False: give up.
__device__ inline bool await_all_by_warp(const Context& c, Phase phase, uint64_t epoch,
                                         uint64_t announcement) {
    bool good = await_peers(c, phase, epoch, announcement, lane_id(), kWarp);
    good = __all_sync(kAllLanes, good);
    if (!good || !has_others(c)) return good;
    good = await_others(c, phase, epoch, announcement, lane_id(), kWarp);
    return __all_sync(kAllLanes, good);
}
__device__ inline bool await_all_by_block(const Context& c, Phase phase, uint64_t epoch,
                                          uint64_t announcement) {
    bool good = await_peers(c, phase, epoch, announcement, threadIdx.x, blockDim.x);
    good = __syncthreads_and(good);
    if (!good || !has_others(c)) return good;
    good = await_others(c, phase, epoch, announcement, threadIdx.x, blockDim.x);
    return __syncthreads_and(good);
}

// The announcement of a dispatch or combine, by the layout that it is given.
__device__ inline uint64_t announcement_of(const Context& c, Phase phase, const int32_t* words,
                                           uint32_t signature) {
    const uint32_t route =
        *reinterpret_cast<const volatile uint32_t*>(words + layout::HandleLayout::kRouteNumber);
    return layout::announcement(current_verb(c.watch.state), route, int(phase), signature);
}

// Of a dispatch that may run while the route before it ends, which counts verbs then.
__device__ inline uint64_t announcement_behind_route(const int32_t* words, uint32_t signature) {
    auto* header = reinterpret_cast<const volatile uint32_t*>(words);
    return layout::announcement(header[layout::HandleLayout::kRouteVerb] + 1,
                                header[layout::HandleLayout::kRouteNumber], int(Phase::kDispatch),
                                signature);
}

// One thread: its announcement, which the layout keeps.
__device__ inline uint64_t begin_route(const Context& c, int32_t* words, int num_tokens,
                                       int experts_beyond, uint64_t epoch) {
    const uint64_t verb = current_verb(c.watch.state);
    const uint64_t route = c.watch.state->layout_base + epoch;
    words[layout::HandleLayout::kNumTokens] = num_tokens;
    words[layout::HandleLayout::kRouteNumber] = int32_t(route);
    words[layout::HandleLayout::kRouteVerb] = int32_t(verb);
    return layout::announcement(verb, route, int(Phase::kRoute),
                                layout::route_signature(c.buffer.topk, experts_beyond));
}

// The whole warp: the most experts of any token, if they are more than its top-k slots, else 0.
__device__ inline int find_experts_beyond(const Choices& choices) {
    int most = 0;
    for (int i = lane_id(); i < choices.num_most; i += kWarp) most = max(most, choices.most[i]);
    most = __reduce_max_sync(kAllLanes, most);
    return most > choices.topk_slots ? most : 0;
}

// The warp that begins a route: tells the ranks of my node; returns the announcement.
__device__ inline uint64_t announce_route(const Context& c, int32_t* words, const Choices& choices,
                                          uint64_t epoch) {
    const int experts_beyond = find_experts_beyond(choices);
    uint64_t mine = 0;
    if (lane_id() == 0) mine = begin_route(c, words, choices.num_tokens, experts_beyond, epoch);
    mine = __shfl_sync(kAllLanes, mine, 0);
    announce(c, Phase::kRoute, mine, lane_id(), kWarp);
    return mine;
}

}  // namespace hybrid_ep::kernels
