// Dispatch over several nodes: a token crosses the network once for each node that needs it.
//
//   x --publish--> my outbox --put, a chunk at a time--> relay window of the rail peer of each node
//   outbox of a peer, or relay window of a peer --pull--> rows
//
// Publishing and pulling are those of one node (dispatch_block.cuh), but for the walker: it goes
// by chunks, and finds the tokens of other nodes in the relay windows. Blocks of their own send
// (internode_send.cuh), and pass on to their node what has arrived. A chunk goes out when its slot
// at the rail peer is free, and that becomes free when all ranks of its node have read it: who
// reads counts, and the owner gives the credit.
#pragma once

#include "device/chunk_walk.cuh"
#include "device/window.cuh"
#include "kernels/dispatch_block.cuh"
#include "kernels/internode_send.cuh"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels::internode {

using namespace device;

// Takes the next copies, a lane each, and lists each as soon as it can be read, in this order.
class RelayWalker {
  public:
    __device__ RelayWalker(const RelayRowsParams& p, const layout::HandleView& handle,
                           PullSmem& smem, uint64_t call)
        : p_(p.dispatch),
          c_(p.context),
          smem_(smem),
          call_(call),
          walk_(handle, c_.relay.world.num_ranks, c_.world.rank, c_.relay.chunk_tokens,
                c_.relay.num_chunks, &c_.world.watch.state->steps_taken, p_.num_blocks,
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
        const auto& relay = c_.relay;
        const int node = mine.source / relay.ranks_per_node,
                  peer = mine.source % relay.ranks_per_node, token = mine.copy.token;
        found = {mine.copy, mine.rows, nullptr, mine.source == c_.world.rank, nullptr};
        wait.signature = p_.record.signature();
        wait.phase = Phase::kDispatch;
        wait.peer = mine.source;
        wait.call = call_;
        if (node == c_.node) {
            wait.patience = Patience::kForPeer;
            wait.channel = token / kParcelTokens;
            wait.flag = flag_in(p_, c_.local_rank, mine.source, wait.channel);
            wait.reached = call_;
            wait.window = Wait::kCalls;
            found.record = c_.peer(peer) + relay.world.record(call_, token);
        } else {
            const layout::SlotUse at = relay.slot_use(call_, token / relay.chunk_tokens);
            wait.channel = at.slot;
            wait.signature = kAnySignature;
            wait.flag = c_.flag_at(relay.flag(Slot::kPassedOn, node, at.slot, peer));
            wait.reached = at.use;
            wait.window = relay.window;
            wait.patience = Patience::kForPassedOn;
            wait.verdict = c_.peer_flag(peer, relay.verdict_flag(node));
            found.record =
                c_.peer(peer) + relay.relay_record(node, at.slot, token % relay.chunk_tokens);
            found.reads =
                c_.peer_flag(peer, relay.flag(Slot::kReads, node, at.slot, c_.local_rank));
        }
    }

    const DispatchParams& p_;
    const NodeContext& c_;
    PullSmem& smem_;
    uint64_t call_;
    ChunkWalk walk_;
    JobList jobs_;
};

template <typename Network>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    relay_rows(const __grid_constant__ RelayRowsParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ DispatchSmem smem;
    const Watch& watch = p.context.world.watch;
    const uint64_t call = current_epoch(watch.state, Phase::kDispatch);
    // those that send come first: all others wait for what they send, and so all of them need SMs
    if (int(blockIdx.x) < p.num_send_blocks) {
        send_chunks<Network>(p, dynamic_smem, call);
    } else if (!run_dispatch<RelayWalker>(p.dispatch, p, dynamic_smem, smem)) {
        return;
    }
    if (p.dispatch.pulls && is_last_block(watch.state) && threadIdx.x == 0) {
        close_dispatch(watch, call);
    }
}

template <typename Network>
void launch_relay_rows(const RelayRowsParams& p, cudaStream_t stream) {
    launch(relay_rows<Network>, p, p.dispatch.num_blocks + p.num_send_blocks, kDispatchThreads,
           max(layout::dynamic_smem_bytes(p.dispatch.ring, 1), kSendSmemBytes), stream);
}

}  // namespace hybrid_ep::kernels::internode
