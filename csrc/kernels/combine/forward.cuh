// A role of combine over several nodes: sums over my node go to the rail peers that are their
// homes. Each chunk of each rail peer:
//
//   until the slot is free in its home window, and my node's ranks have pushed its tokens
//   sum --> home window, then flag "summed" of the token
//   behind the last sum, flag "push free" of my slot
//
// A chunk that no rank of my node has a copy of: until my push slot is free, then flag "nothing".
#pragma once

#include "device/load_then_store.cuh"
#include "kernels/combine/call.cuh"

namespace hybrid_ep::kernels::several_nodes {

template <typename Network>
class Forward {
  public:
    __device__ Forward(const CombineCall& s, const Network& network) : s_(s), network_(network) {}

    // The walker of the role's n-th block. False: give up.
    __device__ bool walk(SumJobs& jobs, int block) const {
        const int others = s_.c.nodes.num_nodes - 1;
        int ring = 0;
        for (int unit = block; unit < others * s_.c.nodes.num_chunks;
             unit += s_.p.num_forward_blocks, ring = (ring + 1) % kRings) {
            const int node = (s_.c.node + 1 + unit % others) % s_.c.nodes.num_nodes;
            if (!forward(jobs, {node, unit / others, ring})) {
                tell_verdict(s_.c, network_);
                return false;
            }
        }
        return true;
    }

    // The herald, for a sum that is stored (0: none), in each lane.
    __device__ void tell(uint64_t packed) const {
        const Note note = Note::of(packed);
        const auto& c = s_.c;
        uint64_t* full = c.flag_at(c.nodes.summed_flag(c.node, note.token));
        void* mapped = packed != 0 ? network_.mapped(full, c.rail_peer(note.owner)) : nullptr;
        if (mapped != nullptr) ptx::store_relaxed(static_cast<uint64_t*>(mapped), s_.value());
        uint32_t to_put = __ballot_sync(kAllLanes, packed != 0 && mapped == nullptr);
        for (; to_put != 0; to_put &= to_put - 1) {
            put(Note::of(__shfl_sync(kAllLanes, packed, __ffs(to_put) - 1)));
        }
        if (packed == 0 || !note.is_last) return;
        s_.free_pushed(s_.push_slot(note.owner, s_.chunk_of(note.token)));
    }

  private:
    // The n-th of the rail peer on `node`, which becomes jobs of one ring.
    struct Chunk {
        int node, n, ring;
    };

    __device__ bool forward(SumJobs& jobs, const Chunk& chunk) const {
        const auto& c = s_.c;
        const int token = chunk.n * c.nodes.chunk_tokens + lane_id();
        uint32_t readers = 0;
        if (lane_id() < c.nodes.chunk_tokens && token < c.nodes.buffer.max_tokens) {
            readers = s_.readers(chunk.node, token);
        }
        const uint32_t tokens = __ballot_sync(kAllLanes, readers != 0);
        bool good = true;
        if (lane_id() == 0) {  // and so what the network reads from here is free too
            good = await(c, s_.until_home_free(chunk.node, s_.slot_use(chunk.n)));
        }
        if (!all_lanes(good)) return false;
        if (tokens == 0) return forward_nothing(chunk);
        if (!all_lanes(s_.await_pushed(chunk.node, token, readers))) return false;

        char* sums = s_.sums_for(network_, chunk.node, s_.slot_use(chunk.n).slot);
        if (readers != 0) forward_values(chunk, sums);
        list_sums(jobs, chunk.ring, tokens, [&](SumJob& job, bool is_last) {
            set_sum(job, chunk, sums, readers);
            job.sum.note = Note{chunk.node, token, is_last}.packed();
        });
        return true;
    }

    // Invariant "one use under way": the home waits for something from each node, or one use of a
    // slot could overtake another.
    __device__ bool forward_nothing(const Chunk& chunk) const {
        const auto& c = s_.c;
        bool good = true;
        if (lane_id() == 0) {
            const layout::PushSlot pushed = s_.push_slot(chunk.node, chunk.n);
            good = await(c, s_.until_push_free(pushed, c.local_rank));
            if (good) {
                s_.free_pushed(pushed);
                const layout::SlotUse home = s_.slot_use(chunk.n);
                network_.signal({c.flag_at(c.nodes.flag(SlotFlag::kNothing, c.node, home.slot)),
                                 flag_value(home.use, s_.record().signature())},
                                c.rail_peer(chunk.node));
            }
        }
        return all_lanes(good);
    }

    // One lane: the values of its token go behind the sum.
    __device__ void forward_values(const Chunk& chunk, char* sums) const {
        if (s_.p.summed.values == nullptr) return;
        const auto& l = s_.c.nodes;
        const layout::PushSlot pushed = s_.push_slot(chunk.node, chunk.n);
        auto* from = reinterpret_cast<const float*>(s_.c.at(l.pushed_values(pushed, lane_id())));
        auto* to = reinterpret_cast<float*>(sums + int64_t(lane_id()) * l.sum_record_bytes +
                                            s_.record().weights_offset());
        load_then_store(
            l.buffer.topk, [&](int k) { return from[k]; },
            [&](int k, float value) { to[k] = value; });
    }

    // One lane: its token.
    __device__ void set_sum(SumJob& job, const Chunk& chunk, char* sums, uint32_t readers) const {
        job.sum.to = sums + int64_t(lane_id()) * s_.c.nodes.sum_record_bytes;
        job.sum.num_rows = s_.set_pushed(job, s_.push_slot(chunk.node, chunk.n), readers);
        job.sum.num_sums = 0;
        job.rows = s_.c.mine();
    }

    // The whole warp: a sum that the adders have left here.
    __device__ void put(const Note& note) const {
        const auto& c = s_.c;
        const int slot = s_.slot_use(s_.chunk_of(note.token)).slot,
                  place = s_.index_in_chunk(note.token);
        network_.put_warp(c.at(c.nodes.home_sum(c.node, slot, place)),
                          c.at(c.nodes.outgoing_sum(note.owner, slot, place)), s_.record().bytes(),
                          c.rail_peer(note.owner),
                          {c.flag_at(c.nodes.summed_flag(c.node, note.token)), s_.value()});
    }

    const CombineCall& s_;
    const Network& network_;
};

}  // namespace hybrid_ep::kernels::several_nodes
