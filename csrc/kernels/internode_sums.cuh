// Combine over several nodes: sums come home through the rail, one row for a token and node.
//
//   rows of a copy --sum over local experts--> push window of the peer on the home's rail      push
//   push window --sum over my node's ranks, in rank order--> home window of the rail peer   forward
//   push window --sum over my node's ranks--> rounded, among the sums of the other nodes in
//                                my home window, in the order of nodes --sum--> y              home
//
// A block has one of these roles, and works as a block of one node's combine does
// (combine_block.cuh): a role is what its walker lists, and whom its heralds tell.
// `values`, one float per row, ride along unsummed: the gradients of the weights.
//
// All walkers take the chunks of tokens in order and all blocks are resident, so the first chunk
// that is not home anywhere can always move on, whatever waits for slots behind it.
#pragma once

#include "kernels/internode_forward.cuh"
#include "kernels/internode_home.cuh"
#include "kernels/internode_push.cuh"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels::internode {

// Which role a block has, and the how-manieth of it.
enum class SumsRole { kPush, kForward, kHome };

__device__ inline SumsRole role_of(const RelaySumsParams& p, int& nth) {
    nth = blockIdx.x;
    if (nth < p.num_push_blocks) return SumsRole::kPush;
    nth -= p.num_push_blocks;
    if (nth < p.num_forward_blocks) return SumsRole::kForward;
    nth -= p.num_forward_blocks;
    return SumsRole::kHome;
}

template <typename Network>
__device__ bool walk(const SumsCall& s, const Network& network, SumJobs& jobs) {
    int nth;
    const SumsRole role = role_of(s.p, nth);
    return role == SumsRole::kPush      ? Push(s).walk(jobs)
           : role == SumsRole::kForward ? Forward<Network>(s, network).walk(jobs, nth)
                                        : Home<Network>(s, network).walk(jobs);
}

// One warp. It ends when all is stored, so it knows what the ring did until when.
template <typename Network>
__device__ void herald(const SumsCall& s, const Network& network, RingSmem& ring) {
    const Stopwatch working(s.c.world.trace);
    auto announce = [&](const auto& role, Span span) {
        announce_sums(ring.sums, s.p.ring.num_slots, [&](uint64_t note) { role.tell(note); });
        if (lane_id() == 0) working.note(span, s.call);
    };
    int nth;
    switch (role_of(s.p, nth)) {
        case SumsRole::kPush:
            return announce(Push(s), Span::kPushSums);
        case SumsRole::kForward:
            return announce(Forward<Network>(s, network), Span::kForwardSums);
        case SumsRole::kHome:
            return announce(Home<Network>(s, network), Span::kSumAtHome);
    }
}

// One block, at its beginning: this rank makes the call.
template <typename Network>
__device__ void announce_call(const SumsCall& s, const Network& network) {
    const auto& c = s.c;
    const auto& b = c.relay.world;
    for (int peer = threadIdx.x; peer < c.relay.ranks_per_node; peer += blockDim.x) {
        ptx::store_release(c.peer_flag(peer, b.flag(Phase::kCombine, c.world.rank, 0)), s.value());
    }
    for (int node = threadIdx.x; node < c.relay.num_nodes; node += blockDim.x) {
        if (node == c.node) continue;
        network.signal(c.flag_at(c.relay.combine_flag(c.node)), s.value(), c.rail_peer(node));
    }
}

// And at its end: so do my node and my rail, even those that nothing came from.
__device__ inline bool await_call(const SumsCall& s) {
    const auto& c = s.c;
    bool good = true;
    for (int i = threadIdx.x; good && i < c.relay.ranks_per_node + c.relay.num_nodes;
         i += blockDim.x) {
        const int node = i - c.relay.ranks_per_node;
        if (node == c.node) continue;
        const int peer = node < 0 ? c.rank_of(c.node, i) : c.rail_peer(node);
        const int64_t flag =
            node < 0 ? c.relay.world.flag(Phase::kCombine, peer, 0) : c.relay.combine_flag(node);
        good = wait_flag(c.flag_at(flag), s.call, s.record().signature(), c.world.watch,
                         Phase::kCombine, peer, 0);
    }
    return __syncthreads_and(good);
}

template <typename T, bool kWeighted, typename Network>
__global__ void __launch_bounds__(kCombineThreads, 1)
    relay_sums(const __grid_constant__ RelaySumsParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ CombineSmem smem;
    const Watch& watch = p.context.world.watch;
    const SumsCall s{p, p.context, current_epoch(watch.state, Phase::kCombine)};
    const Network network(p.context);
    init(smem, p.ring, has_fault(watch.state));
    __syncthreads();
    if (smem.failed) return;
    if (blockIdx.x == 0) announce_call(s, network);
    run_combine<T, kWeighted>(
        p.ring, p.slices, p.summed.row_bytes, dynamic_smem, smem,
        [&](SumJobs& jobs) { return walk(s, network, jobs); },
        [&](RingSmem& ring) { herald(s, network, ring); });
    __syncthreads();
    if (smem.failed) return;
    if (blockIdx.x == 0 && !await_call(s)) return;
    if (is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kCombine, s.call);
    }
}

template <bool kWeighted, typename Network>
auto pick_relay_sums(SumType type) {
    return type == SumType::kBf16   ? relay_sums<__nv_bfloat16, kWeighted, Network>
           : type == SumType::kFp16 ? relay_sums<__half, kWeighted, Network>
                                    : relay_sums<float, kWeighted, Network>;
}

template <typename Network>
void launch_relay_sums(const RelaySumsParams& p, cudaStream_t stream) {
    launch(p.summed.weights != nullptr ? pick_relay_sums<true, Network>(p.summed.type)
                                       : pick_relay_sums<false, Network>(p.summed.type),
           p, p.num_push_blocks + p.num_forward_blocks + p.num_home_blocks, kCombineThreads,
           layout::dynamic_smem_bytes(p.ring, kRings), stream);
}

}  // namespace hybrid_ep::kernels::internode
