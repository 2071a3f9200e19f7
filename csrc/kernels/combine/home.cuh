// A role of combine over several nodes: the sums for my tokens are added. Each chunk of mine:
//
//   until each other node's sums are in my home window, or flag "nothing" of that node;
//   until my node's ranks have pushed its tokens
//   sums --> y
//   behind the last sum, flags "push free" of my slot and "home free" in each rail peer
#pragma once

#include "device/load_then_store.cuh"
#include "device/take.cuh"
#include "kernels/combine/call.cuh"

namespace hybrid_ep::kernels::several_nodes {

template <typename Network>
class Home {
  public:
    __device__ Home(const CombineCall& s, const Network& network) : s_(s), network_(network) {}

    // The walker. False: give up.
    __device__ bool walk(SumJobs& jobs) const {
        const auto& c = s_.c;
        Takes takes(&c.world.watch.state->tokens_taken, c.nodes.num_chunks, s_.p.num_home_blocks, 1,
                    kRings);
        int first, count, ring = 0;
        while (takes.take(first, count)) {
            for (int i = 0; i < count; ++i, ring = (ring + 1) % kRings) {
                if (!sum(jobs, first + i, ring)) return false;
            }
        }
        return true;
    }

    // The herald, for the last sum of a chunk that is stored (0: none), in each lane.
    __device__ void tell(uint64_t packed) const {
        if (packed == 0) return;
        s_.free_home(network_, s_.chunk_of(Note::of(packed).token));
    }

  private:
    // A chunk, as jobs of one ring.
    __device__ bool sum(SumJobs& jobs, int chunk, int ring) const {
        const auto& c = s_.c;
        const int token = chunk * c.nodes.chunk_tokens + lane_id();
        const bool is_token = lane_id() < c.nodes.chunk_tokens && token < s_.p.summed.num_tokens;
        const uint32_t tokens = __ballot_sync(kAllLanes, is_token);
        const Stopwatch waiting(c.world.trace);
        if (!await_nodes(token, is_token, s_.slot_use(chunk))) return false;
        const uint32_t readers = is_token ? s_.readers(c.node, token) : 0;
        if (!all_lanes(s_.await_pushed(c.node, token, readers))) return false;
        if (!__any_sync(kAllLanes, readers != 0) && !await_turn(chunk)) return false;
        if (lane_id() == 0) waiting.note(Span::kAwaitSums, s_.call);
        if (tokens == 0) {  // a chunk beyond my tokens
            if (lane_id() == 0) s_.free_home(network_, chunk);
            return true;
        }
        if (is_token && s_.p.summed.values != nullptr) take_values(token, chunk);
        list_sums(jobs, ring, tokens, [&](SumJob& job, bool is_last) {
            set_sum(job, token, chunk, readers);
            job.sum.note = is_last ? Note{c.node, token, true}.packed() : 0;
        });
        return true;
    }

    // Each lane the distinct experts of its token, node after node.
    struct Experts {
        const int16_t* expert;
        int topk, of_node, at = 0;

        __device__ bool any_of(int node) {
            bool any = false;
            for (; at < topk && expert[at] >= 0 && expert[at] / of_node == node; ++at) any = true;
            return any;
        }
    };
    __device__ Experts experts(int token) const {
        const auto& l = s_.c.nodes;
        return {s_.c.kept.experts_of(s_.p.summed.words, token), l.buffer.topk,
                l.ranks_per_node * l.buffer.num_local_experts};
    }

    // Until the other nodes' sums have come, or from each that nothing does.
    __device__ bool await_nodes(int token, bool is_token, const layout::SlotUse& at) const {
        const auto& c = s_.c;
        Experts mine = experts(is_token ? token : 0);
        bool good = true;
        for (int node = 0; node < c.nodes.num_nodes; ++node) {
            const bool any = is_token && mine.any_of(node);
            const bool something = __any_sync(kAllLanes, any);
            if (node == c.node || !good) continue;
            if (any) {
                good = await(c, s_.until_sent(c.flag_at(c.nodes.summed_flag(node, token)), s_.call,
                                              Wait::kCalls, token, node));
            } else if (!something && lane_id() == 0) {
                good = await(
                    c, s_.until_sent(c.flag_at(c.nodes.flag(SlotFlag::kNothing, node, at.slot)),
                                     at.use, c.nodes.window, at.slot, node));
            }
        }
        return all_lanes(good);
    }

    // Until the push slot's use before has ended (invariant "one use under way"). Ranks that push
    // have waited for it, but for a chunk of padding none does, and it must not free what is still
    // in use.
    __device__ bool await_turn(int chunk) const {
        bool good = true;
        if (lane_id() == 0) {
            good = await(s_.c, s_.until_push_free(s_.push_slot(s_.c.node, chunk), s_.c.local_rank));
        }
        return all_lanes(good);
    }

    // One lane: each top-k slot of its token gets the value of its place.
    __device__ void take_values(int token, int chunk) const {
        const auto& l = s_.c.nodes;
        const int slot = s_.slot_use(chunk).slot;
        const char* pushed = s_.c.at(l.pushed_values(s_.push_slot(s_.c.node, chunk), lane_id()));
        const int topk = l.buffer.topk;
        const Experts mine = experts(token);
        const layout::HandleView handle(s_.p.summed.words, s_.c.world.handle);
        const int8_t* places = handle.places + int64_t(token) * topk;
        float* home_values = s_.p.summed.home_values + int64_t(token) * topk;
        load_then_store<4>(  // this kernel has no registers to spare
            topk,
            [&](int k) {
                const int place = __ldg(&places[k]);
                if (place < 0) return 0.f;
                const int node = __ldg(&mine.expert[place]) / mine.of_node;
                const char* values =
                    node == s_.c.node
                        ? pushed
                        : s_.c.at(l.home_sum(node, slot, lane_id())) + s_.record().weights_offset();
                return reinterpret_cast<const float*>(values)[place];
            },
            [&](int k, float value) { home_values[k] = value; });
    }

    // One lane: its token. The sums of my node's ranks make a sum of their own.
    __device__ void set_sum(SumJob& job, int token, int chunk, uint32_t readers) const {
        const auto& l = s_.c.nodes;
        job.sum.to = s_.p.summed.y + int64_t(token) * s_.p.summed.row_bytes;
        job.sum.num_rows = s_.set_pushed(job, s_.push_slot(s_.c.node, chunk), readers);
        job.sum.num_before_own = -1;
        int terms = job.sum.num_rows;
        Experts mine = experts(token);
        const int slot = s_.slot_use(chunk).slot;
        for (int node = 0; node < l.num_nodes; ++node) {
            if (!mine.any_of(node)) continue;
            if (node == s_.c.node) {
                job.sum.num_before_own = terms - job.sum.num_rows;
            } else {
                s_.set_term(job, terms++, l.home_sum(node, slot, lane_id()));
            }
        }
        job.sum.num_sums = terms - job.sum.num_rows;
        job.rows = job.sums = s_.c.mine();
    }

    const CombineCall& s_;
    const Network& network_;
};

}  // namespace hybrid_ep::kernels::several_nodes
