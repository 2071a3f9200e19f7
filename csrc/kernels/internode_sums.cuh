// Combine over several nodes: sums come home through the rail, one row for a token and node.
//
//   rows of a copy --sum over local experts--> push window of the peer on the home's rail    push
//   push window --sum over my node's ranks, in rank order--> outgoing --put--> home window forward
//   home window --sum over the nodes, in order--> y                                          home
//
// The node that is the home's own is no exception: its sums reach the home window without the
// network. `values`, one float per row, ride along unsummed: the gradients of the weights.
//
// Each role takes the chunks of tokens in order and all blocks are resident, so the first chunk
// that is not home anywhere can always move on, whatever waits for slots behind it.
#pragma once

#include "device/chunk_copies.cuh"
#include "device/trace.cuh"
#include "device/warp_sums.cuh"
#include "device/window.cuh"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels::internode {

using namespace device;

// What all roles know of a call.
struct SumsCall {
    const RelaySumsParams& p;
    const NodeContext& c;
    uint64_t call;

    __device__ layout::RecordLayout record() const {
        return {p.io.row_bytes, 0, p.io.values != nullptr ? c.relay.world.topk * 4 : 0};
    }
    __device__ int num_chunks() const { return c.relay.num_chunks; }
    __device__ int first_token(int chunk) const { return chunk * c.relay.chunk_tokens; }

    __device__ SlotWait wait(const uint64_t* flag, const Turn& turn, int peer,
                             Patience patience) const {
        return {flag, turn, record().signature(), Phase::kCombine, peer, call, patience};
    }
    // For a slot to be free: the use before it has ended.
    __device__ SlotWait wait_free(const uint64_t* flag, const Turn& turn, int peer) const {
        return {flag, {turn.slot, turn.use - 1}, SlotWait::kAnySignature, Phase::kCombine, peer,
                call, Patience::kForOthers};
    }
};

// ---- push: a chunk of a home rank, from this rank's experts

struct PushWalk {
    const SumsCall& s;
    ChunkCopies copies;
    char* relay;  // memory of the peer on the home's rail
    int node, slot, first_token;

    __device__ bool next(WarpSumJob& job) {
        layout::Copy copy;
        int row;
        if (!copies.next(copy, row)) return false;
        const auto& l = s.c.relay;
        const int token = copy.token - first_token;
        const bool has_row = lane_id() < copy.num_rows;
        job.num_rows = copy.num_rows;
        job.row = s.p.io.rows + int64_t(row) * s.p.io.row_bytes;
        job.weight = s.p.io.weights != nullptr && has_row ? s.p.io.weights[row] : 0.f;
        job.sum = relay + l.pushed_sum(node, slot, token, s.c.local_rank, s.p.io.row_bytes);
        if (s.p.io.values != nullptr && lane_id() < copy.num_places) {
            auto* values = reinterpret_cast<float*>(relay + l.pushed_values(node, slot, token));
            values[copy.first_place + lane_id()] = has_row ? s.p.io.values[row] : 0.f;
        }
        return true;
    }
};

template <typename T>
__device__ bool push_chunk(const SumsCall& s, WarpRing& ring, int home, int chunk) {
    const NodeContext& c = s.c;
    const int node = home / c.relay.ranks_per_node, peer = home % c.relay.ranks_per_node;
    const Turn turn = c.relay.turn(s.call, chunk);
    bool good = true;
    if (lane_id() == 0) {
        good = wait_slot(
            c, s.wait_free(c.peer_flag(peer, c.relay.flag(Slot::kForwarded, node, turn.slot)), turn,
                           c.rank_of(c.node, peer)));
    }
    if (!all_lanes(good)) return false;
    const layout::HandleView handle(s.p.words, c.world.handle);
    const int first = s.first_token(chunk);
    WarpSums<T, PushWalk> role{{s, ChunkCopies(handle, home, first, c.relay.chunk_tokens),
                                c.peers.base[peer], node, turn.slot, first},
                               s.p.io.row_bytes,
                               s.p.ring.stage_bytes,
                               ring.header_offset(),
                               s.p.io.weights != nullptr};
    ring.run(role);
    mark_slot(c.peer_flag(peer, c.relay.flag(Slot::kPushed, node, turn.slot, c.local_rank)), turn,
              s.record().signature());
    return true;
}

// ---- forward: a chunk of a rail peer (or mine), from my node's ranks

struct ForwardWalk {
    const SumsCall& s;
    char* sums;  // of the chunk
    int node, slot;
    uint32_t readers;  // of lane i's token
    uint32_t pending;  // tokens with readers

    __device__ bool next(WarpSumJob& job) {
        if (pending == 0) return false;
        const int token = __ffs(pending) - 1;
        pending &= pending - 1;
        const auto& l = s.c.relay;
        const uint32_t ranks = __shfl_sync(0xFFFFFFFFu, readers, token);
        job.num_rows = __popc(ranks);
        const int rank = lane_id() < job.num_rows ? nth_bit(ranks, lane_id()) : 0;
        job.row = s.c.at(l.pushed_sum(node, slot, token, rank, s.p.io.row_bytes));
        job.sum = sums + int64_t(token) * l.sum_record_bytes;
        return true;
    }
};

// The whole warp: all ranks of my node have pushed, and the home's slot is free.
__device__ inline bool await_forward(const SumsCall& s, int node, const Turn& turn) {
    const NodeContext& c = s.c;
    bool good = true;
    if (lane_id() < c.relay.ranks_per_node) {
        good =
            wait_slot(c, s.wait(c.flag_at(c.relay.flag(Slot::kPushed, node, turn.slot, lane_id())),
                                turn, c.rank_of(c.node, lane_id()), Patience::kForPeer));
    }
    if (good && lane_id() == 0) {
        good = wait_slot(c, s.wait_free(c.flag_at(c.relay.flag(Slot::kHomeFree, node, turn.slot)),
                                        turn, c.rail_peer(node)));
    }
    return all_lanes(good);
}

// The whole warp: the values of the chunk's tokens go behind their sums.
__device__ inline void forward_values(const SumsCall& s, char* sums, int node, int slot,
                                      uint32_t tokens) {
    const auto& l = s.c.relay;
    for (; s.p.io.values != nullptr && tokens != 0; tokens &= tokens - 1) {
        const int token = __ffs(tokens) - 1;
        auto* from = reinterpret_cast<const float*>(s.c.at(l.pushed_values(node, slot, token)));
        auto* to = reinterpret_cast<float*>(sums + int64_t(token) * l.sum_record_bytes +
                                            s.record().weights_offset());
        if (lane_id() < l.world.topk) to[lane_id()] = from[lane_id()];
    }
}

template <typename T, typename Network>
__device__ bool forward_chunk(const SumsCall& s, const Network& network, WarpRing& ring, int node,
                              int chunk) {
    const NodeContext& c = s.c;
    const Turn turn = c.relay.turn(s.call, chunk);
    const bool to_me = node == c.node;
    uint64_t* full = c.flag_at(c.relay.flag(Slot::kSummed, c.node, turn.slot));
    if (!await_forward(s, node, turn)) return false;

    const int token = s.first_token(chunk) + lane_id();
    uint32_t readers = 0;
    if (lane_id() < c.relay.chunk_tokens && token < c.relay.world.max_tokens) {
        readers = c.kept.readers_of(s.p.words, node)[token];
    }
    const uint32_t tokens = __ballot_sync(0xFFFFFFFFu, readers != 0);
    char* sums = c.at(to_me ? c.relay.home_sum(node, turn.slot, 0)
                            : c.relay.outgoing_sum(node, turn.slot, 0));
    WarpSums<T, ForwardWalk> role{{s, sums, node, turn.slot, readers, tokens},
                                  s.p.io.row_bytes,
                                  s.p.ring.stage_bytes,
                                  ring.header_offset(),
                                  false};
    ring.run(role);
    forward_values(s, sums, node, turn.slot, tokens);
    if (to_me) {
        mark_slot(full, turn, s.record().signature());
    } else {
        ptx::fence_proxy_async();
        __threadfence_system();  // the network reads what the copy engine and the lanes wrote
        __syncwarp();
        put_rows(network, tokens, c.at(c.relay.home_sum(c.node, turn.slot, 0)), sums,
                 c.relay.sum_record_bytes, s.record().bytes(), full,
                 flag_value(turn.use, s.record().signature()), c.rail_peer(node));
    }
    mark_slot(c.flag_at(c.relay.flag(Slot::kForwarded, node, turn.slot)), turn, 0);
    return true;
}

// The whole warp, having given up: so do those who wait for what comes after.
template <typename Network>
__device__ void give_up_forward(const SumsCall& s, const Network& network, int node, int chunk) {
    const NodeContext& c = s.c;
    if (lane_id() != 0 || node == c.node) return;
    const auto* fault = static_cast<const volatile Fault*>(c.world.watch.fault);
    while (fault->kind == 0) continue;  // whoever came first is writing it
    const int slot = c.relay.turn(s.call, chunk).slot;
    network.signal(c.flag_at(c.relay.flag(Slot::kSummed, c.node, slot)), given_up(fault->peer),
                   c.rail_peer(node));
}

// ---- home: a chunk of my tokens

struct HomeWalk {
    const SumsCall& s;
    layout::HandleView handle;
    int first_token, slot, end, token = 0;

    __device__ bool next(WarpSumJob& job) {
        if (token >= end) return false;
        const auto& l = s.c.relay;
        const int topk = l.world.topk, lane = lane_id(),
                  node_experts = l.ranks_per_node * l.world.num_local_experts;
        const int64_t mine = first_token + token;
        const int expert = lane < topk ? s.c.kept.experts_of(s.p.words, mine)[lane] : -1;
        const int node = expert >= 0 ? expert / node_experts : -1;
        const int before = __shfl_up_sync(0xFFFFFFFFu, node, 1);
        const uint32_t firsts =
            __ballot_sync(0xFFFFFFFFu, node >= 0 && (lane == 0 || before != node));
        job.num_rows = __popc(firsts);
        const int speaker = lane < job.num_rows ? nth_bit(firsts, lane) : 0;
        const int of_node = __shfl_sync(0xFFFFFFFFu, node, speaker);
        job.row = s.c.at(l.home_sum(max(of_node, 0), slot, token));
        job.sum = s.p.io.y + mine * s.p.io.row_bytes;
        if (s.p.io.values != nullptr) take_values(mine, node);
        ++token;
        return true;
    }

    // Lane i has the node of the token's i-th place.
    __device__ void take_values(int64_t mine, int node) const {
        const auto& l = s.c.relay;
        const int topk = l.world.topk, lane = lane_id();
        float value = 0.f;
        if (node >= 0) {
            value = reinterpret_cast<const float*>(s.c.at(l.home_sum(node, slot, token)) +
                                                   s.record().weights_offset())[lane];
        }
        const int place = lane < topk ? handle.places[mine * topk + lane] : -1;
        const float of_place = __shfl_sync(0xFFFFFFFFu, value, max(place, 0));
        if (lane < topk) s.p.io.home_values[mine * topk + lane] = place >= 0 ? of_place : 0.f;
    }
};

template <typename T, typename Network>
__device__ bool sum_chunk(const SumsCall& s, const Network& network, WarpRing& ring, int chunk) {
    const NodeContext& c = s.c;
    const Turn turn = c.relay.turn(s.call, chunk);
    bool good = true;
    for (int node = lane_id(); good && node < c.relay.num_nodes; node += kWarp) {
        good = wait_slot(c, s.wait(c.flag_at(c.relay.flag(Slot::kSummed, node, turn.slot)), turn,
                                   c.rail_peer(node), Patience::kForOthers));
    }
    if (!all_lanes(good)) return false;
    const int first = s.first_token(chunk);
    const layout::HandleView handle(s.p.words, c.world.handle);
    WarpSums<T, HomeWalk> role{
        {s, handle, first, turn.slot, min(c.relay.chunk_tokens, s.p.io.num_tokens - first)},
        s.p.io.row_bytes,
        s.p.ring.stage_bytes,
        ring.header_offset(),
        false};
    ring.run(role);
    uint64_t* free = c.flag_at(c.relay.flag(Slot::kHomeFree, c.node, turn.slot));
    __syncwarp();
    for (int node = 0; node < c.relay.num_nodes && lane_id() == 0; ++node) {
        if (node != c.node) network.signal(free, flag_value(turn.use, 0), c.rail_peer(node));
    }
    mark_slot(free, turn, 0);
    return true;
}

// ---- the kernel

template <typename T, typename Network>
struct SumRoles {
    const SumsCall& s;
    const Network& network;
    WarpRing& ring;

    __device__ void push(int warp, int num_warps) const {
        const int ranks = s.c.relay.world.num_ranks;
        for (int unit = warp; unit < ranks * s.num_chunks(); unit += num_warps) {
            const int home = (s.c.world.rank + 1 + unit % ranks) % ranks;
            if (!push_chunk<T>(s, ring, home, unit / ranks)) return;
        }
    }
    __device__ void forward(int warp, int num_warps) const {
        const int nodes = s.c.relay.num_nodes;
        for (int unit = warp; unit < nodes * s.num_chunks(); unit += num_warps) {
            const int node = (s.c.node + 1 + unit % nodes) % nodes;
            if (!forward_chunk<T>(s, network, ring, node, unit / nodes)) {
                give_up_forward(s, network, node, unit / nodes);
                return;
            }
        }
    }
    __device__ void home(int warp, int num_warps) const {
        for (int chunk = warp; chunk < s.num_chunks(); chunk += num_warps) {
            if (!sum_chunk<T>(s, network, ring, chunk)) return;
        }
    }
};

template <typename T, typename Network>
__global__ void __launch_bounds__(layout::WarpRingShape::kSumWarps* kWarp, 1)
    relay_sums(const __grid_constant__ RelaySumsParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    const Watch& watch = p.context.world.watch;
    if (has_fault(watch.state)) return;
    const uint64_t call = current_epoch(watch.state, Phase::kCombine);
    const SumsCall s{p, p.context, call};
    const Network network(p.context);
    WarpRing ring(dynamic_smem, p.ring);
    const SumRoles<T, Network> roles{s, network, ring};
    const Stopwatch working(p.context.world.trace);

    const int first_forward = p.num_push_blocks, first_home = first_forward + p.num_forward_blocks;
    const int block = blockIdx.x, warps = warps_per_block();
    if (block < first_forward) {
        roles.push(warp_of_role(block, p.num_push_blocks), p.num_push_blocks * warps);
        working.stop(Span::kPushSums, call);
    } else if (block < first_home) {
        roles.forward(warp_of_role(block - first_forward, p.num_forward_blocks),
                      p.num_forward_blocks * warps);
        working.stop(Span::kForwardSums, call);
    } else {
        roles.home(warp_of_role(block - first_home, p.num_home_blocks), p.num_home_blocks * warps);
        working.stop(Span::kSumAtHome, call);
    }
    if (is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kCombine, call);
    }
}

template <typename Network>
void launch_relay_sums(const RelaySumsParams& p, cudaStream_t stream) {
    auto* kernel = p.io.type == SumType::kBf16   ? relay_sums<__nv_bfloat16, Network>
                   : p.io.type == SumType::kFp16 ? relay_sums<__half, Network>
                                                 : relay_sums<float, Network>;
    launch(kernel, p, p.num_push_blocks + p.num_forward_blocks + p.num_home_blocks,
           p.ring.num_warps * kWarp, p.ring.smem_bytes(), stream);
}

}  // namespace hybrid_ep::kernels::internode
