// What the roles of a combine over several nodes (several_nodes.cuh) have in common.
#pragma once

#include "kernels/combine/block.cuh"
#include "kernels/several_nodes.h"
#include "network/window.cuh"

namespace hybrid_ep::kernels::several_nodes {

using namespace network;

struct CombineParams {
    NodesContext context;
    Summed summed;
    int num_push_blocks, num_forward_blocks, num_home_blocks;
    layout::SliceLayout slices;
    layout::RingShape ring;  // of layout::kSumRings
};

// What a herald must know of a sum: whose token, and whether it is the chunk's last.
struct Note {
    int owner;  // a rank, or its node, as the role has it
    int token;
    bool is_last;

    __device__ uint64_t packed() const {
        return 1ull << 63 | uint64_t(is_last) << 62 | uint64_t(owner) << 32 | uint32_t(token);
    }
    static __device__ Note of(uint64_t packed) {
        return {int(packed >> 32 & 0xFFFF), int(packed & 0xFFFFFFFF), bool(packed >> 62 & 1)};
    }
};

// What all roles know of a call.
struct CombineCall {
    const CombineParams& p;
    const NodesContext& c;
    uint64_t call;

    __device__ layout::RecordLayout record() const {
        return {p.summed.row_bytes, 0, p.summed.values != nullptr ? c.nodes.buffer.topk * 4 : 0,
                layout::kind_of_call(int(p.summed.type), p.summed.num_sms)};
    }
    __device__ uint64_t value() const { return flag_value(call, record().signature()); }
    __device__ layout::SlotUse slot_use(int chunk) const { return c.nodes.slot_use(call, chunk); }
    __device__ int chunk_of(int token) const { return token / c.nodes.chunk_tokens; }
    __device__ int index_in_chunk(int token) const { return token % c.nodes.chunk_tokens; }

    __device__ layout::PushSlot push_slot(int node, int chunk) const {
        return c.push_slot(node, call, chunk);
    }

    // Uses of a slot are counted by flags of `window` such slots, see Wait.
    __device__ Wait wait_for(const uint64_t* flag, uint64_t reached, uint32_t signature, int window,
                             int channel, int peer, Timeout timeout,
                             const uint64_t* verdict = nullptr) const {
        return {flag, reached, signature, window, channel, Phase::kCombine,
                peer, call,    timeout,   verdict};
    }
    // For a slot to be free: the use before has ended.
    __device__ Wait until_free(const uint64_t* flag, const layout::SlotUse& at, int window,
                               int peer) const {
        return wait_for(flag, at.use - 1, kAnySignature, window, at.slot, peer,
                        Timeout::kForOthers);
    }
    // In the memory of a rank of my node.
    __device__ Wait until_push_free(const layout::PushSlot& slot, int local_rank) const {
        return until_free(c.peer_flag(local_rank, c.nodes.push_free_flag(slot)), slot.at,
                          slot.window, c.rank_of(c.node, local_rank));
    }
    // For a rank of my node to have pushed its sum of a token of `node`.
    __device__ Wait until_pushed(int node, int token, int local_rank) const {
        return wait_for(c.flag_at(c.nodes.pushed_flag(node, token, local_rank)), call,
                        record().signature(), Wait::kCalls, token, c.rank_of(c.node, local_rank),
                        Timeout::kForPeer);
    }
    __device__ bool await_pushed(int node, int token, uint32_t local_ranks) const {
        bool good = true;
        for (; good && local_ranks != 0; local_ranks &= local_ranks - 1) {
            good = await(c, until_pushed(node, token, __ffs(local_ranks) - 1));
        }
        return good;
    }
    // For what a rail peer sends me.
    __device__ Wait until_sent(const uint64_t* flag, uint64_t reached, int window, int channel,
                               int node) const {
        return wait_for(flag, reached, record().signature(), window, channel, c.rail_peer(node),
                        Timeout::kForOthers, c.flag_at(c.nodes.verdict_flag(node)));
    }
    // Where the sums for the rail peer on `node` go: into its home window if that is mapped, else
    // they stay here for the network.
    template <typename Network>
    __device__ char* sums_for(const Network& network, int node, int slot) const {
        void* home = network.mapped(c.at(c.nodes.home_sum(c.node, slot, 0)), c.rail_peer(node));
        return home != nullptr ? static_cast<char*>(home)
                               : c.at(c.nodes.outgoing_sum(node, slot, 0));
    }
    __device__ Wait until_home_free(int node, const layout::SlotUse& at) const {
        return until_free(c.flag_at(c.nodes.flag(SlotFlag::kHomeFree, node, at.slot)), at,
                          c.nodes.window, c.rail_peer(node));
    }
    // One thread: what was pushed into my slot has been added.
    __device__ void free_pushed(const layout::PushSlot& slot) const {
        ptx::store_release(c.flag_at(c.nodes.push_free_flag(slot)), flag_value(slot.at.use, 0));
    }
    // One thread: a chunk of mine has been added, so what held its sums is free.
    template <typename Network>
    __device__ void free_home(const Network& network, int chunk) const {
        free_pushed(push_slot(c.node, chunk));
        const layout::SlotUse at = slot_use(chunk);
        const uint64_t used = flag_value(at.use, 0);
        uint64_t* home_free = c.flag_at(c.nodes.flag(SlotFlag::kHomeFree, c.node, at.slot));
        for (int node = 0; node < c.nodes.num_nodes; ++node) {
            if (node != c.node) network.signal({home_free, used}, c.rail_peer(node));
        }
    }
    // The ranks of my node that have a copy of a token of the rail peer.
    __device__ uint32_t readers(int node, int token) const {
        return c.kept.readers_of(p.summed.words, node)[token];
    }

    // ---- terms in my symmetric memory

    __device__ void set_term(SumJob& job, int i, int64_t offset) const {
        job.term[i] = uint32_t(offset / 16);
        if (p.summed.weights != nullptr) job.weight[i] = 1.f;
    }
    // What these ranks of my node have pushed, of the lane's token; returns how many they are.
    __device__ int set_pushed(SumJob& job, const layout::PushSlot& slot, uint32_t ranks) const {
        int count = 0;
        for (; ranks != 0; ranks &= ranks - 1) {
            set_term(job, count++, c.nodes.pushed_sum(slot, lane_id(), __ffs(ranks) - 1));
        }
        return count;
    }
};

// The whole warp: the sums of those lanes that have a token, in this order, as jobs of one ring, as
// many at a time as it has room for. A lane fills its job by `fill(job, is_last)`.
template <typename Fill>
__device__ __forceinline__ void list_sums(SumJobs& jobs, int ring, uint32_t tokens, Fill fill) {
    for (uint32_t left = tokens; left != 0;) {
        const int nth = __popc(left & lanes_below());
        const bool now = left >> lane_id() & 1 && nth < SumJobs::kMostListed;
        if (now) {
            SumJob& job = jobs.begin({ring, nth});
            fill(job, left >> lane_id() == 1);
            jobs.end({ring, nth});
        }
        const uint32_t listed = __ballot_sync(kAllLanes, now);
        jobs.advance(ring, __popc(listed));
        left &= ~listed;
    }
}

}  // namespace hybrid_ep::kernels::several_nodes
