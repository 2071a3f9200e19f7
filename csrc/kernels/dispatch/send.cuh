// The part of dispatch over several nodes that uses the network: tokens out, credits back.
//
//   my outbox --put, a chunk at a time, when its slot is free--> relay window of a rail peer
//   relay window: that a chunk has arrived --passed on--> the ranks of my node, which read it
//   relay window, read by all ranks of my node --credit--> the rail peer that sent
//
// What a network card writes is ordered for the GPU that it writes to, and for no other: so the
// owner of a window waits for the card's signal, and tells its node by a release of its own.
// None of the three waits for another: a warp does whichever can be done. Each chunk to a rail
// peer, and each from one:
//
//   out   until flag "credit" has the use before, and its tokens are in my outbox: rows, "arrived"
//   in    until flag "arrived": "passed on" in each rank of my node
//         until all "reads" have come: they become zero, then "credit" to the rail peer
#pragma once

#include "device/trace.cuh"
#include "device/warp_copy.cuh"
#include "kernels/dispatch/block.cuh"
#include "kernels/several_nodes.h"
#include "network/window.cuh"

namespace hybrid_ep::kernels::several_nodes {

using namespace network;

struct DispatchParams {
    NodesContext context;
    kernels::DispatchParams dispatch;  // as on one node; its blocks come behind those that send
    int num_send_blocks;               // 0 where it does not pull
};

// Rows of a chunk on their way to the same rows of the rail peer's slot, whose flag then has
// reached `use`. Of a row, `row_bytes` matter.
struct RowsOut {
    uint32_t wanted;  // the rows to go, a bit each
    char* to;         // named by its address in my memory
    const char* from;
    int stride, row_bytes;
    uint64_t* flag;
    uint64_t use;
    int rank;

    // The next rows that follow each other, as one piece: its offset and bytes.
    __device__ void take_run(int64_t& offset, int64_t& bytes) {
        const int begin = __ffs(wanted) - 1;
        const uint32_t gap = ~(wanted >> begin);
        const bool dense = stride - row_bytes < 128;  // what lies between them goes along
        const int run = !dense ? 1 : gap == 0 ? kWarp : __ffs(gap) - 1;
        wanted &= run + begin == kWarp ? (1u << begin) - 1 : ~(((1u << run) - 1) << begin);
        offset = int64_t(begin) * stride;
        bytes = int64_t(run - 1) * stride + row_bytes;
    }
};

// The warp, through the network: each run of rows adds its share to the flag, as only its own bytes
// are there when it does (invariant "signal behind its bytes").
template <typename Network>
__device__ void put_rows(const Network& network, RowsOut rows) {
    if (rows.wanted == 0) {
        if (lane_id() == 0) network.signal({rows.flag, kFlagStep, true}, rows.rank);
        return;
    }
    for (int run = 0; rows.wanted != 0; ++run) {
        int64_t offset, bytes;
        rows.take_run(offset, bytes);
        network.put_warp(rows.to + offset, rows.from + offset, bytes, rows.rank,
                         {rows.flag, share_of_step(run, rows.wanted == 0), true});
    }
}

// The warp, into memory that is mapped at `to` and `flag`.
__device__ inline void copy_rows(BulkCopier& copier, RowsOut rows, char* to, uint64_t* flag) {
    if (lane_id() == 0) {
        ptx::fence_proxy_async();  // the rows were written by ordinary stores
        while (rows.wanted != 0) {
            int64_t offset, bytes;
            rows.take_run(offset, bytes);
            copier.copy(to + offset, rows.from + offset, bytes);
        }
        ptx::bulk_wait_written<0>();
        ptx::fence_proxy_async();
        ptx::store_release(flag, flag_value(rows.use, 0));
    }
    __syncwarp();
}

// A chunk on its way to another node, or from one: every warp walks over some of both.
struct RailChunk {
    int node, chunk;
    layout::SlotUse at;
};
struct ChunkOut : RailChunk {
    uint32_t tokens;  // those that the node needs
};
struct ChunkIn : RailChunk {
    int expected;  // in lane r: tokens that reader r has a copy of
};

template <typename Network>
class SendChunks {
  public:
    // Each warp has its share of the chunks, every `num_warps`-th.
    __device__ SendChunks(const DispatchParams& p, char* smem, uint64_t call, int warp,
                          int num_warps)
        : p_(p),
          c_(p.context),
          network_(p.context),
          copier_(smem),
          deadline_(p.context),
          call_(call),
          end_(c_.nodes.num_chunks * (c_.nodes.num_nodes - 1)),
          step_(num_warps),
          sending_(warp),
          passing_(warp),
          freeing_(warp) {
        if (warp < end_) out_ = outgoing(warp), in_ = incoming(warp);
    }

    // The whole warp: sends its chunks, passes on as many and gives credit for them, whatever can
    // go first.
    __device__ void run() {
        if (!move_all()) tell_verdict(c_, network_);
    }

  private:
    // False: give up.
    __device__ __forceinline__ bool move_all() {
        while (sending_ < end_ || freeing_ < end_) {
            bool moved = false;
            if (passing_ < end_ && !pass_next_on(moved)) return false;
            if (sending_ < end_ && !send_next(moved)) return false;
            if (freeing_ < passing_ && !free_next(moved)) return false;
            if (moved) deadline_.restart();
        }
        return true;
    }

    // The next chunk of each, if it can go now. False: give up.
    __device__ __forceinline__ bool pass_next_on(bool& moved) {
        const RailChunk chunk = nth(passing_);
        const Wait arrival = from_rail(SlotFlag::kArrived, chunk, chunk.at.use);
        if (!all_reached(arrival)) return has_time(arrival);
        pass_on(chunk);
        passing_ += step_;
        return moved = true;
    }
    __device__ __forceinline__ bool send_next(bool& moved) {
        const Wait credit = from_rail(SlotFlag::kCredit, out_, out_.at.use - 1);
        if (!all_reached(credit) || !is_published(out_)) return has_time(credit);
        send(out_);
        sending_ += step_;
        if (sending_ < end_) out_ = outgoing(sending_);
        return moved = true;
    }
    __device__ __forceinline__ bool free_next(bool& moved) {
        const Wait read = first_read(in_);
        if (read.flag != nullptr) return has_time(read);
        give_credit(in_);
        freeing_ += step_;
        if (freeing_ < end_) in_ = incoming(freeing_);
        return moved = true;
    }
    __device__ __forceinline__ bool has_time(const Wait& wait) {
        return __all_sync(kAllLanes, deadline_.go_on(wait));
    }

    // The n-th of the walk, chunk after chunk: invariant "chunks in order".
    __device__ RailChunk nth(int n) const {
        const int others = c_.nodes.num_nodes - 1, chunk = n / others;
        return {(c_.node + 1 + n % others) % c_.nodes.num_nodes, chunk,
                c_.nodes.slot_use(call_, chunk)};
    }
    __device__ int token_of(const RailChunk& chunk) const {
        return chunk.chunk * c_.nodes.chunk_tokens + lane_id();
    }
    __device__ bool has_token(const RailChunk& chunk) const {
        return lane_id() < c_.nodes.chunk_tokens && token_of(chunk) < c_.nodes.buffer.max_tokens;
    }

    __device__ ChunkOut outgoing(int n) const {
        ChunkOut chunk{nth(n), 0};
        const auto& b = c_.nodes.buffer;
        bool wanted = false;
        if (has_token(chunk)) {
            const int begin = c_.rank_of(chunk.node, 0) * b.num_local_experts,
                      end = begin + c_.nodes.ranks_per_node * b.num_local_experts;
            const int16_t* experts = c_.kept.experts_of(p_.dispatch.sent.words, token_of(chunk));
            for (int i = 0; i < b.topk; ++i) wanted |= experts[i] >= begin && experts[i] < end;
        }
        chunk.tokens = __ballot_sync(kAllLanes, wanted);
        return chunk;
    }

    __device__ ChunkIn incoming(int n) const {
        ChunkIn chunk{nth(n), 0};
        const uint32_t readers = has_token(chunk) ? c_.kept.readers_of(p_.dispatch.sent.words,
                                                                       chunk.node)[token_of(chunk)]
                                                  : 0;
        for (int reader = 0; reader < c_.nodes.ranks_per_node; ++reader) {
            const int count = __popc(__ballot_sync(kAllLanes, readers >> reader & 1));
            if (lane_id() == reader) chunk.expected = count;
        }
        return chunk;
    }

    // For what a rail peer says of a slot: that a chunk has arrived, or that it is free.
    __device__ Wait from_rail(SlotFlag kind, const RailChunk& chunk, uint64_t use) const {
        return {c_.flag_at(c_.nodes.flag(kind, chunk.node, chunk.at.slot)),
                use,
                kAnySignature,
                c_.nodes.window,
                chunk.at.slot,
                Phase::kDispatch,
                c_.rail_peer(chunk.node),
                call_,
                Timeout::kForOthers,
                c_.flag_at(c_.nodes.verdict_flag(chunk.node))};
    }

    // ---- out

    __device__ bool all_reached(const Wait& wait) const {
        return __all_sync(kAllLanes, has_reached(wait.flag, wait.reached));
    }
    // By the blocks beside.
    __device__ bool is_published(const ChunkOut& out) const {
        bool published = true;
        if (out.tokens >> lane_id() & 1) {
            published = has_reached(
                flag_in(p_.dispatch, c_.local_rank, c_.world.rank, token_of(out) / kParcelTokens),
                call_);
        }
        published = __all_sync(kAllLanes, published);
        __syncwarp();
        return published;
    }
    __device__ void send(const ChunkOut& out) {
        const auto& b = c_.nodes.buffer;
        const auto& record = p_.dispatch.record;
        const RowsOut rows{out.tokens,
                           c_.at(c_.nodes.relay_record(c_.node, out.at.slot, 0)),
                           c_.at(b.record(call_, out.chunk * c_.nodes.chunk_tokens)),
                           b.record_bytes,
                           record.bytes(),
                           c_.flag_at(c_.nodes.flag(SlotFlag::kArrived, c_.node, out.at.slot)),
                           out.at.use,
                           c_.rail_peer(out.node)};
        if (void* to = network_.mapped(rows.to, rows.rank)) {
            void* flag = network_.mapped(rows.flag, rows.rank);
            copy_rows(copier_, rows, static_cast<char*>(to), static_cast<uint64_t*>(flag));
        } else {
            put_rows(network_, rows);
        }
    }

    // ---- in

    // Each lane, which has seen the arrival itself, to a reader: invariant "owner passes on".
    __device__ void pass_on(const RailChunk& in) const {
        if (lane_id() >= c_.nodes.ranks_per_node) return;
        ptx::store_release(c_.peer_flag(lane_id(), c_.nodes.flag(SlotFlag::kPassedOn, in.node,
                                                                 in.at.slot, c_.local_rank)),
                           flag_value(in.at.use, 0));
    }

    __device__ uint64_t* reads(const ChunkIn& in, int reader) const {
        return c_.flag_at(c_.nodes.flag(SlotFlag::kReads, in.node, in.at.slot, reader));
    }
    // The first wait before the credit for a chunk; without a flag: there is none left.
    __device__ Wait first_read(const ChunkIn& in) const {
        const bool reads_yet =
            in.expected > 0 && !has_reached(reads(in, lane_id()), uint64_t(in.expected));
        const int reader = __ffs(__ballot_sync(kAllLanes, reads_yet)) - 1;
        if (reader < 0) return {};
        return {reads(in, reader),
                uint64_t(in.expected),
                kAnySignature,
                Wait::kReads,
                in.at.slot,
                Phase::kDispatch,
                c_.rank_of(c_.node, reader),
                call_,
                Timeout::kForOthers,
                nullptr};
    }
    // Invariant "one use under way": no rank counts reads between the last one of this use and the
    // credit for the next.
    __device__ void give_credit(const ChunkIn& in) const {
        if (in.expected > 0) *reads(in, lane_id()) = 0;
        __threadfence_system();
        __syncwarp();
        if (lane_id() != 0) return;
        network_.signal({c_.flag_at(c_.nodes.flag(SlotFlag::kCredit, c_.node, in.at.slot)),
                         flag_value(in.at.use, 0)},
                        c_.rail_peer(in.node));
    }

    const DispatchParams& p_;
    const NodesContext& c_;
    Network network_;
    BulkCopier copier_;
    Deadline deadline_;
    uint64_t call_;
    int end_, step_;                   // of the walks, which count all chunks of all nodes
    int sending_, passing_, freeing_;  // the warp's next ones
    ChunkOut out_{};                   // that is being sent
    ChunkIn in_{};                     // that is being freed
};

// Of dynamic shared memory.
constexpr int kSendSmemBytes = kDispatchWarps * BulkCopier::kSmemBytes + layout::kSlotAlign;

// The whole block, one of the first of the grid. Chunks that follow each other are dealt to other
// blocks, so to other SMs and queue pairs.
template <typename Network>
__device__ void send_chunks(const DispatchParams& p, char* smem, uint64_t call) {
    const Context& world = p.context.world;
    if (__any_sync(kAllLanes, has_fault(world.watch.state))) return;
    const Stopwatch sending(world.trace);
    const int block = blockIdx.x;
    if (block == 0 && warp_id() == 0) {
        announce_to_rail(p.context, Network(p.context),
                         announcement_of(world, Phase::kDispatch, p.dispatch.sent.words,
                                         p.dispatch.record.signature()));
    }
    smem +=
        (-ptx::smem_address(smem) & (layout::kSlotAlign - 1)) + warp_id() * BulkCopier::kSmemBytes;
    if (warp_id() < kDispatchWarps) {  // as many as there is shared memory for
        SendChunks<Network>(p, smem, call, warp_id() * p.num_send_blocks + block,
                            p.num_send_blocks * kDispatchWarps)
            .run();
    }
    sending.stop(Span::kSendRows, call);
}

}  // namespace hybrid_ep::kernels::several_nodes
