// Dispatch over several nodes: a token crosses the network once for each node that needs it.
//
//   x --publish--> my outbox --put, a chunk at a time--> relay window of the rail peer of each node
//   outbox of a peer, or relay window of a peer --pull--> rows
//
// Publishing and pulling are those of one node (block.cuh), but for the walker: it goes
// by chunks, and finds the tokens of other nodes in the relay windows. Blocks of their own send
// (send.cuh), and pass on to their node what has arrived. A chunk goes out when its slot
// at the rail peer is free, and that becomes free when all ranks of its node have read it: each
// counts its reads, and the owner gives the credit.
#pragma once

#include "device/chunk_walk.cuh"
#include "kernels/dispatch/block.cuh"
#include "kernels/dispatch/send.cuh"
#include "kernels/launch.cuh"
#include "network/window.cuh"

namespace hybrid_ep::kernels::several_nodes {

using namespace network;

// Takes the next copies, a lane each, and lists each as soon as it can be read, in this order.
class ChunkWalker {
  public:
    __device__ ChunkWalker(const DispatchParams& p, const layout::HandleView& handle,
                           PullSmem& smem, uint64_t call)
        : p_(p.dispatch),
          c_(p.context),
          smem_(smem),
          call_(call),
          walk_(handle, c_.nodes.buffer.num_ranks, c_.world.rank, c_.nodes.chunk_tokens,
                c_.nodes.num_chunks, &c_.world.watch.state->steps_taken, p_.num_blocks,
                JobList::most_copies(p_)),
          jobs_(p_, handle, smem) {}

    __device__ void run() {
        ChunkWalk::Taken mine;
        while (walk_.take(mine)) {
            const Stopwatch waiting(c_.world.trace);
            FoundCopy found{};
            Wait wait{};
            if (mine.valid) find(mine, found, wait);
            const bool good = in_order(c_, mine.valid && publishes(p_), wait, [&](uint32_t lanes) {
                list(lanes >> lane_id() & 1, found);
            });
            if (!publishes(p_)) list(mine.valid, found);
            if (lane_id() == 0) waiting.note(Span::kAwaitRows, call_);
            if (good) continue;
            if (lane_id() == 0) smem_.failed = true;
            break;
        }
        jobs_.end();
    }

  private:
    __device__ void list(bool is_there, const FoundCopy& found) {
        const bool is_read = found.copy.num_rows > 0 && has_rows(p_);
        jobs_.add(is_there && is_read, found);
        // a copy whose rows were all dropped is not read, but it is counted on
        if (is_there && !is_read && found.reads != nullptr) {
            ptx::add_release(found.reads, kOneRead);
        }
    }

    // Where the record of a copy is, and the flag that says so.
    __device__ void find(const ChunkWalk::Taken& mine, FoundCopy& found, Wait& wait) const {
        const auto& nodes = c_.nodes;
        const int node = mine.source / nodes.ranks_per_node,
                  peer = mine.source % nodes.ranks_per_node, token = mine.copy.token;
        found = {mine.copy, mine.rows, nullptr, mine.source == c_.world.rank, nullptr};
        wait.signature = p_.record.signature();
        wait.phase = Phase::kDispatch;
        wait.peer = mine.source;
        wait.call = call_;
        if (node == c_.node) {
            wait.timeout = Timeout::kForPeer;
            wait.channel = token / kParcelTokens;
            wait.flag = flag_in(p_, c_.local_rank, mine.source, wait.channel);
            wait.reached = call_;
            wait.window = Wait::kCalls;
            found.record = c_.peer(peer) + nodes.buffer.record(call_, token);
        } else {
            const layout::SlotUse at = nodes.slot_use(call_, token / nodes.chunk_tokens);
            wait.channel = at.slot;
            wait.signature = kAnySignature;
            wait.flag = c_.flag_at(nodes.flag(SlotFlag::kPassedOn, node, at.slot, peer));
            wait.reached = at.use;
            wait.window = nodes.window;
            wait.timeout = Timeout::kForPassedOn;
            wait.verdict = c_.peer_flag(peer, nodes.verdict_flag(node));
            found.record =
                c_.peer(peer) + nodes.relay_record(node, at.slot, token % nodes.chunk_tokens);
            found.reads =
                c_.peer_flag(peer, nodes.flag(SlotFlag::kReads, node, at.slot, c_.local_rank));
        }
    }

    const kernels::DispatchParams& p_;
    const NodesContext& c_;
    PullSmem& smem_;
    uint64_t call_;
    ChunkWalk walk_;
    JobList jobs_;
};

template <typename Network, typename Rows>
__device__ __forceinline__ void make_call(const DispatchParams& p, const Rows& rows) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ DispatchSmem smem;
    const Watch& watch = p.context.world.watch;
    const uint64_t call = current_epoch(watch.state, Phase::kDispatch);
    // invariant "resident first": all others wait for what those that send do, so these need SMs
    if (int(blockIdx.x) < p.num_send_blocks) {
        send_chunks<Network>(p, dynamic_smem, call);
    } else if (!run_dispatch<ChunkWalker>(p.dispatch, p, rows, dynamic_smem, smem)) {
        return;
    }
    if (p.dispatch.pulls) end_block(watch, call);
}

template <typename Network>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch(const __grid_constant__ DispatchParams p) {
    make_call<Network>(p, StoreRows{});
}

constexpr int kScalers = layout::kScalersOfSeveralNodes;
constexpr int kBackwardThreads = kThreadsFor<ScaleRows<float, kScalers>>;

struct CombineBackwardParams {
    DispatchParams dispatch;
    Weighted weighted;
};

template <typename T, typename Network>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    combine_backward(const __grid_constant__ CombineBackwardParams p) {
    make_call<Network>(p.dispatch, ScaleRows<T, kScalers>{p.weighted});
}

template <typename Network>
void launch_combine_backward(const NodesContext& context, const kernels::CombineBackwardParams& p,
                             cudaStream_t stream) {
    const kernels::DispatchParams& dispatch = p.dispatch;
    const auto kernel = for_type(
        p.weighted.type, [](auto t) { return kKernel<combine_backward<decltype(t), Network>>; });
    launch(kernel, {{context, dispatch, dispatch.first_block}, p.weighted},
           dispatch.first_block + dispatch.num_blocks, kBackwardThreads,
           max(layout::scale_smem_bytes(dispatch.ring, kScalers), kSendSmemBytes), stream,
           kInPairs);
}

template <typename Network>
void launch_dispatch(const NodesContext& context, const kernels::DispatchParams& p,
                     cudaStream_t stream) {
    launch(kKernel<dispatch<Network>>, {context, p, p.first_block}, p.first_block + p.num_blocks,
           kDispatchThreads, max(layout::dynamic_smem_bytes(p.ring, 1), kSendSmemBytes), stream,
           kInPairs);
}

}  // namespace hybrid_ep::kernels::several_nodes
