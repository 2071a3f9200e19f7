// A role of combine over several nodes: sums of this rank's experts go to the peers on the rails of
// their homes. Each copy, chunks in order: until the slot is free in the peer's push window; sum
// --> slot; flag "pushed" of the token.
#pragma once

#include "device/chunk_walk.cuh"
#include "kernels/combine/call.cuh"

namespace hybrid_ep::kernels::several_nodes {

class Push {
  public:
    __device__ explicit Push(const CombineCall& s) : s_(s) {}

    // The walker. False: give up.
    __device__ bool walk(SumJobs& jobs) const {
        const auto& c = s_.c;
        const layout::HandleView handle(s_.p.summed.words, c.world.handle);
        ChunkWalk walk(handle, c.nodes.buffer.num_ranks, c.world.rank, c.nodes.chunk_tokens,
                       c.nodes.num_chunks, &c.world.watch.state->steps_taken, s_.p.num_push_blocks,
                       kRings * SumJobs::kMostListed);
        ChunkWalk::Taken mine;
        while (walk.take(mine)) {
            Wait wait{};
            if (mine.valid) wait = until_free(mine);
            if (!in_order(c, mine.valid, wait, [&](uint32_t lanes) { list(jobs, mine, lanes); })) {
                return false;
            }
        }
        return true;
    }

    // The herald, for a sum that is stored (0: none), in each lane.
    __device__ void tell(uint64_t packed) const {
        if (packed == 0) return;
        const Note note = Note::of(packed);
        const auto& l = s_.c.nodes;
        const int node = note.owner / l.ranks_per_node, peer = note.owner % l.ranks_per_node;
        ptx::store_relaxed(s_.c.peer_flag(peer, l.pushed_flag(node, note.token, s_.c.local_rank)),
                           s_.value());
    }

  private:
    // Where a copy's sum goes: a slot of the peer on its home's rail.
    struct PeerSlot {
        int peer;
        char* memory;  // of the peer
        layout::PushSlot at;
    };
    __device__ PeerSlot slot_of(const ChunkWalk::Taken& mine) const {
        const auto& c = s_.c;
        const int node = mine.source / c.nodes.ranks_per_node,
                  peer = mine.source % c.nodes.ranks_per_node;
        return {peer, c.peer(peer), s_.push_slot(node, s_.chunk_of(mine.copy.token))};
    }
    __device__ Wait until_free(const ChunkWalk::Taken& mine) const {
        const PeerSlot slot = slot_of(mine);
        return s_.until_push_free(slot.at, slot.peer);
    }

    // The copies of these lanes.
    __device__ void list(SumJobs& jobs, const ChunkWalk::Taken& mine, uint32_t lanes) const {
        if (lanes >> lane_id() & 1) {
            const SumJobs::Position at = jobs.in_turn(__popc(lanes & lanes_below()));
            send_values(mine);
            set_sum(jobs.begin(at), mine);
            jobs.end(at);
        }
        jobs.advance_in_turn(__popc(lanes));
    }

    // One lane. Dropped rows have the value 0.
    __device__ void send_values(const ChunkWalk::Taken& mine) const {
        if (s_.p.summed.values == nullptr) return;
        const layout::Copy& copy = mine.copy;
        const PeerSlot slot = slot_of(mine);
        auto* values = reinterpret_cast<float*>(
            slot.memory + s_.c.nodes.pushed_values(slot.at, s_.index_in_chunk(copy.token)));
        for (int i = 0; i < copy.num_places; ++i) {
            values[copy.first_place + i] =
                i < copy.num_rows ? __ldg(&s_.p.summed.values[mine.rows[i]]) : 0.f;
        }
    }

    __device__ void set_sum(SumJob& job, const ChunkWalk::Taken& mine) const {
        const auto& io = s_.p.summed;
        const layout::Copy& copy = mine.copy;
        const PeerSlot slot = slot_of(mine);
        job.sum.to = slot.memory +
                     s_.c.nodes.pushed_sum(slot.at, s_.index_in_chunk(copy.token), s_.c.local_rank);
        job.sum.note = Note{mine.source, copy.token, false}.packed();
        job.sum.num_rows = copy.num_rows;
        job.sum.num_sums = 0;
        job.rows = io.rows;
        const uint32_t units = uint32_t(io.row_bytes / 16);
#pragma unroll 8
        for (int i = 0; i < copy.num_rows; ++i)
            job.term[i] = uint32_t(__ldg(&mine.rows[i])) * units;
        if (io.weights == nullptr) return;
#pragma unroll 8
        for (int i = 0; i < copy.num_rows; ++i) {
            job.weight[i] = __ldg(&io.weights[__ldg(&mine.rows[i])]);
        }
    }

    const CombineCall& s_;
};

}  // namespace hybrid_ep::kernels::several_nodes
