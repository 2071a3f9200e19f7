// Who announces verbs to whom: the ranks of a node to each other, and rail peers, whose words a
// rank passes on to its node. So every rank sees the announcement of every other.
#pragma once

#include "device/flag.cuh"
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

// One thread: until `source` has announced the verb that I announced. False: another one, or give
// up.
__device__ inline bool await_announcement(const Context& c, Phase phase, uint64_t epoch,
                                          uint64_t announcement, int source) {
    const uint64_t theirs = await_announced(c.watch, phase, source, epoch, announcement);
    const bool is_of_node = source >= c.first_peer && source < c.first_peer + c.num_peers;
    if (theirs != 0 && !is_of_node && source % c.num_peers == c.local_rank()) {
        for (int peer = 0; peer < c.num_peers; ++peer) {
            if (peer == c.local_rank()) continue;
            ptx::store_release(announced_in(c, peer, source, announcement), theirs);
        }
    }
    if (theirs == 0 || theirs == announcement) return theirs != 0;
    report_fault(c.watch, FaultKind::kOtherCall, phase, source, 0, epoch, theirs, announcement);
    return false;
}

// The threads that announced: until all ranks make this verb too. False: give up. First those who
// tell me themselves: the others' words come through ranks that do the same.
__device__ inline bool await_announcements(const Context& c, Phase phase, uint64_t epoch,
                                           uint64_t announcement, int first, int step) {
    const int num_nodes = c.buffer.num_ranks / c.num_peers;
    bool good = true;
    for (int i = first; good && i < c.num_peers + num_nodes; i += step) {
        const int node = i - c.num_peers;
        const int source = node < 0 ? c.first_peer + i : node * c.num_peers + c.local_rank();
        if (node >= 0 && source == c.rank) continue;
        good = await_announcement(c, phase, epoch, announcement, source);
    }
    if (num_nodes == 1 || c.num_peers == 1) return good;
    for (int source = first; good && source < c.buffer.num_ranks; source += step) {
        good = await_announcement(c, phase, epoch, announcement, source);
    }
    return good;
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

// One thread of the kernel that begins a route: its announcement, which the layout keeps.
__device__ inline uint64_t begin_route(const Context& c, int32_t* words, int num_tokens,
                                       uint64_t epoch) {
    const uint64_t verb = current_verb(c.watch.state);
    const uint64_t route = c.watch.state->layout_base + epoch;
    words[layout::HandleLayout::kNumTokens] = num_tokens;
    words[layout::HandleLayout::kRouteNumber] = int32_t(route);
    words[layout::HandleLayout::kRouteVerb] = int32_t(verb);
    return layout::announcement(verb, route, int(Phase::kRoute), c.buffer.topk);
}

}  // namespace hybrid_ep::kernels
