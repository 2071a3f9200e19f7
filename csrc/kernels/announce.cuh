// Who announces verbs to whom: the ranks of a node to each other, and rail peers. So on several
// nodes every rank has the same announcement as every other, or some rank sees two that differ.
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

// The same threads: until all who announce to me make this verb too. False: give up.
__device__ inline bool await_announcements(const Context& c, Phase phase, uint64_t epoch,
                                           uint64_t announcement, int first, int step) {
    bool good = true;
    for (int source = first; good && source < c.buffer.num_ranks; source += step) {
        const bool is_of_node = source >= c.first_peer && source < c.first_peer + c.num_peers;
        if (is_of_node || source % c.num_peers == c.local_rank()) {
            good = await_announced(c.watch, phase, source, epoch, announcement);
        }
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
    words[layout::HandleLayout::kNumTokens] = num_tokens;
    words[layout::HandleLayout::kRouteNumber] = int32_t(epoch);
    words[layout::HandleLayout::kRouteVerb] = int32_t(verb);
    return layout::announcement(verb, epoch, int(Phase::kRoute), c.buffer.topk);
}

}  // namespace hybrid_ep::kernels
