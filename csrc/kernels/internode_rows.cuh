// Dispatch over several nodes: a token crosses the network once for each node that needs it.
//
//   my outbox --put, a chunk at a time--> relay window of the rail peer of each node send_chunks
//   outbox of a peer, or relay window of a peer --TMA load--> stage --TMA stores--> rows pull_chunk
//
// A chunk goes out when its slot at the rail peer is free, and that becomes free when all ranks of
// its node have consumed it: which they say to the rail peer, and its send_chunks to mine. So one
// kernel does both, all its blocks being resident, and every warp takes its chunks in order: the
// first chunk that is not consumed anywhere can always move on.
#pragma once

#include "device/chunk_copies.cuh"
#include "device/trace.cuh"
#include "device/warp_ring.cuh"
#include "device/window.cuh"
#include "kernels/internode_send.cuh"
#include "kernels/launch.cuh"
#include "kernels/padding.cuh"

namespace hybrid_ep::kernels::internode {

using namespace device;
using layout::SliceLayout;

// The role of the ring: the copies of one chunk of a source rank, slice by slice.
struct PullChunk {
    // Behind the stage: what to do with it once it has landed.
    struct Header {
        int num_rows, slice, first_place, unused;
        int row[kWarp];
    };
    static_assert(sizeof(Header) <= layout::WarpRingShape::kHeaderBytes);

    const RelayRowsParams& p;
    int header_offset;
    ChunkCopies copies;
    const char* records;  // of the chunk's first token
    int first_token;
    layout::Copy copy{};
    int row = 0, next_slice = 0;

    __device__ bool load(WarpRing& ring) {
        if (next_slice == 0) {
            do {
                if (!copies.next(copy, row)) return false;
            } while (copy.num_rows == 0);
        }
        const SliceLayout& slices = p.slices;
        const int slice = next_slice;
        next_slice = slice + 1 == slices.num_slices ? 0 : slice + 1;
        const int offset = slice * slices.slice_bytes;
        const int bytes =
            slice + 1 == slices.num_slices ? p.record.bytes() - offset : slices.slice_bytes;
        ring.expect(bytes);
        char* stage = ring.load_stage();
        auto* header = reinterpret_cast<Header*>(stage + header_offset);
        if (lane_id() == 0) {
            const int64_t record =
                int64_t(copy.token - first_token) * p.context.relay.world.record_bytes;
            ptx::bulk_load(stage, records + record + offset, bytes, ring.load_barrier());
            header->num_rows = copy.num_rows;
            header->slice = slice;
            header->first_place = copy.first_place;
        }
        header->row[lane_id()] = row;
        ring.advance_load();
        return true;
    }

    __device__ void work(const char* stage) {
        auto* header = reinterpret_cast<const Header*>(stage + header_offset);
        const int num_rows = header->num_rows, offset = header->slice * p.slices.slice_bytes;
        const int bytes = min(p.slices.slice_bytes, p.record.row_bytes - offset);
        if (lane_id() < num_rows) {
            ptx::bulk_store(
                p.rows.x + int64_t(header->row[lane_id()]) * p.record.row_bytes + offset, stage,
                bytes);
        }
        if (header->slice == p.slices.num_slices - 1) store_trailer(*header, stage + bytes);
    }

    __device__ void store_trailer(const Header& header, const char* trailer) const {
        const int lane = lane_id();
        if (p.record.weight_bytes > 0 && lane < header.num_rows) {
            auto* weights = reinterpret_cast<const float*>(trailer + p.record.weights_offset() -
                                                           p.record.scales_offset());
            p.rows.weights[header.row[lane]] = weights[header.first_place + lane];
        }
        const int scale_bytes = p.record.scale_bytes;
        for (int i = 0; i < header.num_rows && scale_bytes > 0; ++i) {
            char* to = p.rows.scales + int64_t(header.row[i]) * scale_bytes;
            for (int b = lane; b < scale_bytes; b += kWarp) to[b] = trailer[b];
        }
    }
};

// The whole block: until all tokens of my node are in their outboxes.
__device__ inline bool await_node(const RelayRowsParams& p, uint64_t call) {
    const NodeContext& c = p.context;
    bool good = true;
    for (int i = threadIdx.x; good && i < c.relay.ranks_per_node * p.num_fill_blocks;
         i += blockDim.x) {
        const int peer = i / p.num_fill_blocks, channel = i % p.num_fill_blocks;
        good =
            wait_flag(c.flag_at(c.relay.published_flag(peer, channel)), call, p.record.signature(),
                      c.world.watch, Phase::kDispatch, c.rank_of(c.node, peer), channel);
    }
    good = __syncthreads_and(good);
    ptx::fence_proxy_async();
    return good;
}

// The whole warp. False: give up.
__device__ inline bool pull_chunk(const RelayRowsParams& p, WarpRing& ring, int source, int chunk,
                                  uint64_t call) {
    const NodeContext& c = p.context;
    const int node = source / c.relay.ranks_per_node, peer = source % c.relay.ranks_per_node;
    const int first_token = chunk * c.relay.chunk_tokens;
    const layout::HandleView handle(p.words, c.world.handle);
    const ChunkCopies copies(handle, source, first_token, c.relay.chunk_tokens);
    if (node == c.node) {
        const char* records = c.peers.base[peer] + c.relay.world.record(call, first_token);
        PullChunk role{p, ring.header_offset(), copies, records, first_token};
        ring.run(role);
        return true;
    }
    const Turn turn = c.relay.turn(call, chunk);
    bool good = true;
    if (lane_id() == 0) {
        good = wait_slot(
            c, {c.peer_flag(peer, c.relay.flag(Slot::kArrived, node, turn.slot)), turn,
                p.record.signature(), Phase::kDispatch, source, call, Patience::kForPeer});
    }
    if (!all_lanes(good)) return false;
    const char* records = c.peers.base[peer] + c.relay.relay_record(node, turn.slot, 0);
    PullChunk role{p, ring.header_offset(), copies, records, first_token};
    ring.run(role);
    mark_slot(c.peer_flag(peer, c.relay.flag(Slot::kConsumed, node, turn.slot, c.local_rank)), turn,
              0);
    return true;
}

__device__ inline void pull_chunks(const RelayRowsParams& p, char* smem, uint64_t call) {
    const NodeContext& c = p.context;
    const int warp = warp_of_role(blockIdx.x - p.num_send_blocks, p.num_pull_blocks),
              num_warps = p.num_pull_blocks * warps_per_block();
    const layout::HandleView handle(p.words, c.world.handle);
    if (handle.header[layout::HandleLayout::kMayHavePadding]) {
        zero_padding(p.rows, p.record, handle, c.relay.world.num_local_experts, warp, num_warps);
    }
    const Stopwatch waiting(c.world.trace);
    if (!await_node(p, call)) return;
    waiting.stop(Span::kAwaitRows, call);
    const Stopwatch pulling(c.world.trace);
    WarpRing ring(smem, p.ring);
    const int ranks = c.relay.world.num_ranks;
    for (int unit = warp; unit < ranks * c.relay.num_chunks; unit += num_warps) {
        const int source = (c.world.rank + 1 + unit % ranks) % ranks;
        if (!pull_chunk(p, ring, source, unit / ranks, call)) return;
    }
    pulling.stop(Span::kPullRows, call);
}

template <typename Network>
__global__ void __launch_bounds__(layout::WarpRingShape::kMoveWarps* kWarp, 1)
    relay_rows(const __grid_constant__ RelayRowsParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    const Watch& watch = p.context.world.watch;
    if (has_fault(watch.state)) return;
    const uint64_t call = current_epoch(watch.state, Phase::kDispatch);
    if (blockIdx.x < p.num_send_blocks) {
        send_chunks<Network>(p, call);
    } else {
        pull_chunks(p, dynamic_smem, call);
    }
    if (is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kDispatch, call);
    }
}

template <typename Network>
void launch_relay_rows(const RelayRowsParams& p, cudaStream_t stream) {
    launch(relay_rows<Network>, p, p.num_send_blocks + p.num_pull_blocks, p.ring.num_warps * kWarp,
           p.ring.smem_bytes(), stream);
}

}  // namespace hybrid_ep::kernels::internode
