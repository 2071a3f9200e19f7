// Dispatch: every copy is pulled once and lands in all its rows.
//
//   outbox record of the source rank --TMA load over NVLink--> stage --TMA stores--> rows[row_i]
//                                                                `--> weights[row_i], scales[row_i]
//
// Padding rows are zeroed first, while the peers may still be publishing.
#include "device/copy_walk.cuh"
#include "device/flag.cuh"
#include "device/ring.cuh"
#include "device/trace.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using layout::Phase;
using layout::SliceLayout;

struct PullRows {
    // Behind the stage: what to do with it once it has landed.
    struct Header {
        int num_rows, slice, first_place, unused;
        int row[kWarp];
    };
    static_assert(sizeof(Header) <= layout::kStageHeaderBytes);

    const PullRowsParams& p;
    SliceLayout slices;
    int header_offset;
    uint64_t epoch;
    CopyWalk walk;
    layout::Copy copy{};
    const char* record = nullptr;
    int row = 0;
    int next_slice = 0;

    __device__ bool load(Ring& ring) {
        if (next_slice == 0) {
            int source;
            do {
                if (!walk.next(copy, source, row)) return false;
            } while (copy.num_rows == 0);
            record = p.context.peers.base[source] + p.context.buffer.record(epoch, copy.token);
        }
        const int slice = next_slice;
        next_slice = slice + 1 == slices.num_slices ? 0 : slice + 1;
        int bytes = slice + 1 == slices.num_slices ? p.record.bytes() - slice * slices.slice_bytes
                                                   : slices.slice_bytes;
        ring.expect(bytes);
        char* stage = ring.load_stage();
        auto* header = reinterpret_cast<Header*>(stage + header_offset);
        if (lane_id() == 0) {
            ptx::bulk_load(stage, record + slice * slices.slice_bytes, bytes, ring.load_barrier());
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
        const int num_rows = header->num_rows, offset = header->slice * slices.slice_bytes;
        const int bytes = min(slices.slice_bytes, p.record.row_bytes - offset);
        if (lane_id() < num_rows) {
            ptx::bulk_store(p.rows + int64_t(header->row[lane_id()]) * p.record.row_bytes + offset,
                            stage, bytes);
        }
        if (header->slice == slices.num_slices - 1) store_trailer(*header, stage + bytes);
    }

    __device__ void store_trailer(const Header& header, const char* trailer) const {
        const int lane = lane_id();
        if (p.record.weight_bytes > 0 && lane < header.num_rows) {
            auto* weights = reinterpret_cast<const float*>(trailer + p.record.weights_offset() -
                                                           p.record.scales_offset());
            p.weights[header.row[lane]] = weights[header.first_place + lane];
        }
        const int scale_bytes = p.record.scale_bytes;
        for (int i = 0; i < header.num_rows && scale_bytes > 0; ++i) {
            char* to = p.scales + int64_t(header.row[i]) * scale_bytes;
            if (scale_bytes % 4 == 0) {
                for (int b = lane * 4; b < scale_bytes; b += kWarp * 4) {
                    *reinterpret_cast<int*>(to + b) = *reinterpret_cast<const int*>(trailer + b);
                }
            } else {
                for (int b = lane; b < scale_bytes; b += kWarp) to[b] = trailer[b];
            }
        }
    }
};

__device__ void zero_row(const PullRowsParams& p, int64_t row) {
    auto* to = reinterpret_cast<uint4*>(p.rows + row * p.record.row_bytes);
    for (int i = lane_id(); i < p.record.row_bytes / 16; i += kWarp) to[i] = uint4{};
    char* scales = p.scales + row * p.record.scale_bytes;
    for (int i = lane_id(); i < p.record.scale_bytes; i += kWarp) scales[i] = 0;
    if (lane_id() == 0 && p.record.weight_bytes > 0) p.weights[row] = 0.f;
}

// The end of each expert's group, and the tail after the last.
__device__ void zero_padding(const PullRowsParams& p, const layout::HandleView& handle, int warp,
                             int num_warps) {
    const int experts = p.context.buffer.num_local_experts;
    for (int e = 0; e <= experts; ++e) {
        int64_t begin = handle.offsets[e] + (e < experts ? handle.counts[e] : 0);
        int64_t end = e < experts ? handle.offsets[e + 1] : p.num_rows;
        for (int64_t row = begin + warp; row < end; row += num_warps) zero_row(p, row);
    }
}

__global__ void __launch_bounds__(layout::kMaxRingWarps* kWarp)
    pull_rows(const __grid_constant__ PullRowsParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    const auto& b = p.context.buffer;
    const Watch& watch = p.context.watch;
    const uint64_t epoch = current_epoch(watch.state, Phase::kDispatch);
    const int warp = blockIdx.x * warps_per_block() + warp_id(),
              num_warps = gridDim.x * warps_per_block();
    layout::HandleView handle(p.words, p.context.handle);

    if (handle.header[layout::HandleLayout::kMayHavePadding] && !has_fault(watch.state)) {
        const Stopwatch zeroing(p.context.trace);
        zero_padding(p, handle, warp, num_warps);
        zeroing.stop(Span::kZeroPadding, epoch);
    }
    const Stopwatch waiting(p.context.trace);
    if (!wait_all_flags(p.context.peers.base[p.context.rank], b, Phase::kDispatch,
                        p.num_publish_blocks, epoch, p.record.signature(), watch)) {
        return;
    }
    waiting.stop(Span::kAwaitRows, epoch);
    const Stopwatch pulling(p.context.trace);
    Ring ring(dynamic_smem, p.ring);
    PullRows role{p, p.slices, ring.header_offset(), epoch,
                  CopyWalk(handle, b.num_ranks, p.context.rank, warp, num_warps)};
    ring.run(role);
    pulling.stop(Span::kPullRows, epoch);
    if (is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kDispatch, epoch);
    }
}

}  // namespace

void launch_pull_rows(const PullRowsParams& p, cudaStream_t stream) {
    launch(pull_rows, p, p.num_blocks, p.ring.num_warps * kWarp, p.ring.smem_bytes(), stream);
}

}  // namespace hybrid_ep::kernels
