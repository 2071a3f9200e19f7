// Combine over several nodes: sums come home through the rail, one row for a token and node.
//
//   rows of a copy --sum over local experts--> push window of the peer on the home's rail      push
//   push window --sum over my node's ranks, in rank order--> home window of the rail peer   forward
//   push window --sum over my node's ranks--> rounded, among the sums of the other nodes in
//                                my home window, in the order of nodes --sum--> y              home
//
// A block has one of these roles, and works as a block of one node's combine does
// (block.cuh): a role is what its walker lists, and whom its heralds tell.
// `values`, one float per row, ride along unsummed: the gradients of the weights.
//
// All walkers take the chunks of tokens in order, and all blocks that forward are resident with one
// that pushes and one at home; so the first chunk that is not home anywhere can always move on,
// whatever waits for slots behind it.
#pragma once

#include "kernels/announce.cuh"
#include "kernels/combine/forward.cuh"
#include "kernels/combine/home.cuh"
#include "kernels/combine/push.cuh"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels::several_nodes {

// Which role a block has, and the how-manieth of it. Invariant "resident first": other ranks wait
// for what each forwards, so all of these come first; then one that pushes, which is enough to push
// all.
enum class Role { kPush, kForward, kHome };

__device__ inline Role role_of(const CombineParams& p, int& nth) {
    nth = blockIdx.x;
    if (nth < p.num_forward_blocks) return Role::kForward;
    nth -= p.num_forward_blocks;
    if (nth == 0) return Role::kPush;
    return nth <= p.num_home_blocks ? Role::kHome : Role::kPush;
}

template <typename Network>
__device__ bool walk(const CombineCall& s, const Network& network, SumJobs& jobs) {
    int nth;
    const Role role = role_of(s.p, nth);
    return role == Role::kPush      ? Push(s).walk(jobs)
           : role == Role::kForward ? Forward<Network>(s, network).walk(jobs, nth)
                                    : Home<Network>(s, network).walk(jobs);
}

// One warp. It ends when all is stored, so it knows what the ring did until when.
template <typename Network>
__device__ void herald(const CombineCall& s, const Network& network, RingSmem& ring) {
    const Stopwatch working(s.c.world.trace);
    auto announce = [&](const auto& role, Span span) {
        announce_sums(ring.sums, s.p.ring.num_slots, [&](uint64_t note) { role.tell(note); });
        if (lane_id() == 0) working.note(span, s.call);
    };
    int nth;
    switch (role_of(s.p, nth)) {
        case Role::kPush:
            return announce(Push(s), Span::kPushSums);
        case Role::kForward:
            return announce(Forward<Network>(s, network), Span::kForwardSums);
        case Role::kHome:
            return announce(Home<Network>(s, network), Span::kSumAtHome);
    }
}

// One block, at its beginning: this rank makes the call.
template <typename Network>
__device__ void announce_call(const CombineCall& s, const Network& network) {
    const uint64_t mine =
        announcement_of(s.c.world, Phase::kCombine, s.p.summed.words, s.record().signature());
    announce(s.c.world, Phase::kCombine, mine, threadIdx.x, blockDim.x);
    if (warp_id() == 0) announce_to_rail(s.c, network, mine);
}

// And at its end: so do all ranks, even those that nothing came from.
__device__ inline bool await_call(const CombineCall& s) {
    const uint64_t mine =
        announcement_of(s.c.world, Phase::kCombine, s.p.summed.words, s.record().signature());
    return await_all_by_block(s.c.world, Phase::kCombine, s.call, mine);
}

template <typename T, bool kWeighted, typename Network>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ CombineSmem smem;
    const Watch& watch = p.context.world.watch;
    const CombineCall s{p, p.context, current_epoch(watch.state, Phase::kCombine)};
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

template <typename Network>
void launch_combine(const NodesContext& context, const kernels::CombineParams& p,
                    cudaStream_t stream) {
    // pushing reads every row of the experts, the other roles sums of them
    const int forward = context.nodes.num_nodes == 1 ? 0 : max(1, p.num_blocks / 5);
    const int home = max(1, p.num_blocks / 3), push = p.num_blocks - forward - home;
    const auto kernel = for_type(p.summed.type, [&](auto t) {
        return p.summed.weights != nullptr ? kKernel<combine<decltype(t), true, Network>>
                                           : kKernel<combine<decltype(t), false, Network>>;
    });
    launch(kernel, {context, p.summed, push, forward, home, p.slices, p.ring}, p.num_blocks,
           kCombineThreads, layout::dynamic_smem_bytes(p.ring, kRings), stream, kInPairs);
}

}  // namespace hybrid_ep::kernels::several_nodes
