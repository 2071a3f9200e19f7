// The half of dispatch over several nodes that uses the network: tokens out, credits back.
//
//   my outbox --put, a chunk at a time, when its slot is free--> relay window of a rail peer
//   relay window, consumed by all ranks of my node --credit--> the rail peer that sent
//
// Neither waits for the other: a warp does whichever can be done.
#pragma once

#include "device/trace.cuh"
#include "device/window.cuh"

namespace hybrid_ep::kernels::internode {

using namespace device;

// The walk of a warp over (chunk, other node), chunk after chunk.
struct RailCursor {
    int at, stride, others, node, num_nodes;

    __device__ bool done(int num_chunks) const { return at >= num_chunks * others; }
    __device__ int chunk() const { return at / others; }
    __device__ int to() const { return (node + 1 + at % others) % num_nodes; }
    __device__ void advance() { at += stride; }
};

template <typename Network>
struct SendChunks {
    const RelayRowsParams& p;
    const NodeContext& c;
    Network network;
    uint64_t call;

    __device__ SlotWait credit(const RailCursor& cursor) const {
        const Turn turn = c.relay.turn(call, cursor.chunk());
        return {c.flag_at(c.relay.flag(Slot::kCredit, cursor.to(), turn.slot)),
                {turn.slot, turn.use - 1},
                SlotWait::kAnySignature,
                Phase::kDispatch,
                c.rail_peer(cursor.to()),
                call,
                Patience::kForOthers};
    }

    // The first reader of my node that has not consumed the chunk of a rail peer; -1: all have.
    __device__ int first_reader(const RailCursor& cursor) const {
        const Turn turn = c.relay.turn(call, cursor.chunk());
        bool reads = false;
        if (lane_id() < c.relay.ranks_per_node) {
            reads = !has_reached(
                c.flag_at(c.relay.flag(Slot::kConsumed, cursor.to(), turn.slot, lane_id())),
                turn.use);
        }
        return __ffs(__ballot_sync(0xFFFFFFFFu, reads)) - 1;
    }

    __device__ SlotWait consumption(const RailCursor& cursor, int reader) const {
        const Turn turn = c.relay.turn(call, cursor.chunk());
        return {c.flag_at(c.relay.flag(Slot::kConsumed, cursor.to(), turn.slot, reader)),
                turn,
                SlotWait::kAnySignature,
                Phase::kDispatch,
                c.rank_of(c.node, reader),
                call,
                Patience::kForOthers};
    }

    __device__ void send(const RailCursor& cursor) const {
        const auto& b = c.relay.world;
        const int first = cursor.chunk() * c.relay.chunk_tokens, token = first + lane_id();
        bool wanted = false;
        if (lane_id() < c.relay.chunk_tokens && token < b.max_tokens) {
            const int begin = c.rank_of(cursor.to(), 0) * b.num_local_experts,
                      end = begin + c.relay.ranks_per_node * b.num_local_experts;
            const int16_t* experts = c.kept.experts_of(p.words, token);
            for (int i = 0; i < b.topk; ++i) wanted |= experts[i] >= begin && experts[i] < end;
        }
        const Turn turn = c.relay.turn(call, cursor.chunk());
        put_rows(network, __ballot_sync(0xFFFFFFFFu, wanted),
                 c.at(c.relay.relay_record(c.node, turn.slot, 0)), c.at(b.record(call, first)),
                 b.record_bytes, p.record.bytes(),
                 c.flag_at(c.relay.flag(Slot::kArrived, c.node, turn.slot)),
                 flag_value(turn.use, p.record.signature()), c.rail_peer(cursor.to()));
    }

    __device__ void give_credit(const RailCursor& cursor) const {
        const Turn turn = c.relay.turn(call, cursor.chunk());
        if (lane_id() != 0) return;
        network.signal(c.flag_at(c.relay.flag(Slot::kCredit, c.node, turn.slot)),
                       flag_value(turn.use, 0), c.rail_peer(cursor.to()));
    }

    // The whole warp: sends its chunks and gives credit for as many, whatever can go first.
    __device__ void run(int warp, int num_warps) const {
        const int chunks = c.relay.num_chunks;
        RailCursor sending{warp, num_warps, c.relay.num_nodes - 1, c.node, c.relay.num_nodes};
        RailCursor freeing = sending;
        Deadline deadline(c);
        while (!sending.done(chunks) || !freeing.done(chunks)) {
            bool moved = false;
            if (!sending.done(chunks)) {
                const SlotWait wait = credit(sending);
                moved = __all_sync(0xFFFFFFFFu, has_reached(wait.flag, wait.turn.use));
                if (moved) {
                    send(sending);
                    sending.advance();
                } else if (!__all_sync(0xFFFFFFFFu, deadline.go_on(wait))) {
                    return;
                }
            }
            if (!freeing.done(chunks)) {
                const int reader = first_reader(freeing);
                if (reader < 0) {
                    give_credit(freeing);
                    freeing.advance();
                    moved = true;
                } else if (!__all_sync(0xFFFFFFFFu, deadline.go_on(consumption(freeing, reader)))) {
                    return;
                }
            }
            if (moved) deadline.restart();
        }
    }
};

template <typename Network>
__device__ void send_chunks(const RelayRowsParams& p, uint64_t call) {
    const Stopwatch sending(p.context.world.trace);
    const SendChunks<Network> role{p, p.context, Network(p.context), call};
    role.run(warp_of_role(blockIdx.x, p.num_send_blocks), p.num_send_blocks * warps_per_block());
    sending.stop(Span::kSendRows, call);
}

}  // namespace hybrid_ep::kernels::internode
