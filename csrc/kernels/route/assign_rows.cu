// From the top-k of all ranks to my rows: which copies I pull and where their rows lie.
//
//   counts [source, tile, expert] --prefix sums--> first row of each (expert, source, tile)
//   experts [token, K] of my tile --bitmap-----> row of each token within these
//                                `--> copies, rows: the pull list of the handle
//
// One block per (source, tile); no block waits for another: each sums the counts that come before
// its own, which are a few tens of KB in local memory, since the sources pushed them.
#include "device/flag.cuh"
#include "device/trace.cuh"
#include "device/warp.cuh"
#include "kernels/announce.cuh"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using layout::kTileTokens;
using layout::Phase;

constexpr int kThreads = 512;
constexpr int kMaskWords = kTileTokens / 32;

struct Smem {
    int* before;        // [EL + 1] rows of each expert, then copies, before this tile
    int* total;         // [EL + 1] the same over all tiles
    int* offsets;       // [EL + 1] first row of each expert's group, not bounded
    uint32_t* chooses;  // [EL, kMaskWords] which tokens of the tile chose the expert

    __device__ Smem(char* base, int num_local_experts)
        : before(reinterpret_cast<int*>(base)),
          total(before + num_local_experts + 1),
          offsets(total + num_local_experts + 1),
          chooses(reinterpret_cast<uint32_t*>(offsets + num_local_experts + 1)) {}

    static int bytes(int num_local_experts) {
        return (3 * (num_local_experts + 1) + num_local_experts * kMaskWords) * 4;
    }
};

// Threads side by side take an expert each, and groups of them share the tiles.
__device__ void sum_counts(const AssignRowsParams& p, const Smem& smem, int source, int tile,
                           uint64_t epoch) {
    const auto& b = p.context.buffer;
    const int width = b.num_local_experts + 1;
    const int side_by_side = min(width, kThreads), groups = kThreads / side_by_side;
    const int group = threadIdx.x / side_by_side;
    if (group == groups) return;
    for (int at = threadIdx.x % side_by_side; at < width; at += side_by_side) {
        int total = 0, before = 0;
        for (int s = 0; s < b.num_ranks; ++s) {
            auto* counts =
                reinterpret_cast<const uint16_t*>(p.context.mine() + b.counts_of(epoch, s)) + at;
#pragma unroll 4
            for (int c = group; c < b.num_tiles; c += groups) {
                const int count = counts[c * width];
                total += count;
                if (s < source || (s == source && c < tile)) before += count;
            }
        }
        atomicAdd(&smem.total[at], total);
        atomicAdd(&smem.before[at], before);
    }
}

// One warp: offsets of the padded groups; returns the rows before this tile, of all experts.
__device__ int scan_experts(const AssignRowsParams& p, const Smem& smem) {
    const int experts = p.context.buffer.num_local_experts;
    int end = 0, rows_before = 0;
    for (int base = 0; base < experts; base += kWarp) {
        int e = base + lane_id();
        int padded = e < experts ? layout::round_up(smem.total[e], p.align) : 0;
        int inclusive = warp_inclusive_sum(padded);
        if (e < experts) smem.offsets[e] = end + inclusive - padded;
        end += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
        rows_before += __reduce_add_sync(kAllLanes, e < experts ? smem.before[e] : 0);
    }
    if (lane_id() == 0) smem.offsets[experts] = end;
    return rows_before;
}

__device__ __forceinline__ int bounded(const AssignRowsParams& p, int row) {
    return p.max_rows >= 0 && row > p.max_rows ? int(p.max_rows) : row;
}

// One block: what Python and the host want to know.
__device__ void report(const AssignRowsParams& p, const Smem& smem,
                       const layout::HandleView& handle) {
    const auto& b = p.context.buffer;
    const int experts = b.num_local_experts, required = smem.offsets[experts];
    volatile int32_t* mail = p.mail != nullptr ? p.mail->offsets() : nullptr;
    for (int e = threadIdx.x; e <= experts; e += kThreads) {
        int begin = bounded(p, smem.offsets[e]);
        if (mail != nullptr) mail[e] = begin;
        handle.offsets[e] = p.layout.offsets[e] = begin;
        if (e == experts) continue;
        int kept = bounded(p, smem.offsets[e] + smem.total[e]) - begin;
        handle.counts[e] = p.layout.counts[e] = kept;
        p.layout.padded_counts[e] = bounded(p, smem.offsets[e + 1]) - begin;
    }
    // The host waits for the ticket. The barrier orders the offsets, which all threads write,
    // before the release, which is of the scope of the system: the ticket is not seen before
    // them.
    __syncthreads();
    if (threadIdx.x == 0) {
        if (p.mail != nullptr) ptx::store_release(&p.mail->ticket, p.ticket);
        *p.layout.required_rows = required;
        *p.layout.overflow = p.max_rows >= 0 && required > p.max_rows;
        handle.header[layout::HandleLayout::kRequiredRows] = required;
        handle.header[layout::HandleLayout::kMayHavePadding] = p.align > 1 || p.max_rows >= 0;
        handle.header[layout::HandleLayout::kNumCopies] = smem.total[experts];
        handle.source_first[b.num_ranks] = smem.total[experts];
    }
}

// The whole block, after a fault: no rows. What comes next on the stream may use the numbers before
// the host hears of the fault, as a grouped GEMM uses offsets.
__device__ void report_nothing(const NewLayout& layout, int num_local_experts) {
    for (int e = threadIdx.x; e <= num_local_experts; e += kThreads) {
        layout.offsets[e] = 0;
        if (e == num_local_experts) continue;
        layout.counts[e] = 0;
        layout.padded_counts[e] = 0;
    }
    if (threadIdx.x == 0) *layout.required_rows = *layout.overflow = 0;
}

// The whole block, once it has seen the announcements of all ranks: whether all tokens have top-k
// slots for their experts. All ranks see the same, so either all go on or none.
__device__ bool have_topk_slots(const Context& c, uint64_t epoch, uint64_t mine) {
    bool good = true;
    for (int source = threadIdx.x; source < c.buffer.num_ranks; source += kThreads) {
        const int experts = layout::experts_beyond(announced_by(c.watch, source, mine));
        if (experts == 0) continue;
        report_fault(c.watch, FaultKind::kTooManyExperts, Phase::kRoute, source, 0, epoch,
                     uint64_t(experts));
        good = false;
    }
    return __syncthreads_and(good);
}

// The whole block, invariant "calls in step": the peers make this verb too, not only a route of
// this number. With the flags of all peers this makes a half of the routing inbox free ("half
// free"). And their tokens have top-k slots for their experts.
__device__ bool await_call(const AssignRowsParams& p, const layout::HandleView& handle,
                           uint64_t epoch) {
    const uint64_t mine =
        layout::announcement(uint32_t(handle.header[layout::HandleLayout::kRouteVerb]),
                             uint32_t(handle.header[layout::HandleLayout::kRouteNumber]),
                             int(Phase::kRoute), p.context.buffer.topk);
    return await_all_by_block(p.context, Phase::kRoute, epoch, mine) &&
           have_topk_slots(p.context, epoch, mine);
}

// A thread per token of the tile; all threads of the block call it.
__device__ void list_copies(const AssignRowsParams& p, const Smem& smem,
                            const layout::HandleView& handle, int source, int tile, int rows_before,
                            uint64_t epoch) {
    const auto& b = p.context.buffer;
    const int first_expert = p.context.rank * b.num_local_experts;
    const int in_tile = threadIdx.x;
    const bool active = in_tile < kTileTokens;
    auto* experts =
        reinterpret_cast<const int16_t*>(p.context.mine() + b.experts_of(epoch, source)) +
        (int64_t(tile) * kTileTokens + in_tile) * b.topk;

    layout::Copy copy{};
    int rank_end = 0;  // experts below it belong to ranks already counted
    for (int place = 0; active && place < b.topk; ++place) {
        int expert = experts[place], local = expert - first_expert;
        if (expert < 0 || local >= b.num_local_experts) break;
        if (local >= 0) {
            atomicOr(&smem.chooses[local * kMaskWords + in_tile / 32], 1u << (in_tile % 32));
            if (copy.num_places++ == 0) copy.first_place = uint8_t(place);
        } else if (expert >= rank_end) {
            const int rank = expert / b.num_local_experts;
            if (rank != source) ++copy.others_before;
            rank_end = (rank + 1) * b.num_local_experts;
        }
    }

    // how many of the tile's copies and rows come before mine: scan over the threads, then over the
    // warps
    __shared__ int warp_copies[kThreads / kWarp], warp_rows[kThreads / kWarp];
    const bool mine = copy.num_places > 0;
    int rows_upto = warp_inclusive_sum(copy.num_places);
    uint32_t have = __ballot_sync(kAllLanes, mine);
    if (lane_id() == kWarp - 1) {
        warp_rows[warp_id()] = rows_upto;
        warp_copies[warp_id()] = __popc(have);
    }
    __syncthreads();
    int copy_at = smem.before[b.num_local_experts] + __popc(have & lanes_below());
    copy.first_row = rows_before + rows_upto - copy.num_places;
    for (int w = 0; w < warp_id(); ++w) {
        copy_at += warp_copies[w];
        copy.first_row += warp_rows[w];
    }
    copy.token = tile * kTileTokens + in_tile;
    if (source == p.context.rank && active && copy.token < b.max_tokens) {
        handle.own_copies[copy.token] = mine ? copy_at : -1;
    }
    if (!mine) return;

    for (int i = 0; i < copy.num_places; ++i) {
        int local = experts[copy.first_place + i] - first_expert;
        const uint32_t* chooses = &smem.chooses[local * kMaskWords];
        int row = smem.offsets[local] + smem.before[local] +
                  __popc(chooses[in_tile / 32] & ((1u << (in_tile % 32)) - 1));
        for (int w = 0; w < in_tile / 32; ++w) row += __popc(chooses[w]);
        handle.rows[copy.first_row + i] = row;
        if (p.max_rows < 0 || row < p.max_rows) ++copy.num_rows;
    }
    handle.copies[copy_at] = copy;
}

// Three blocks per SM: the grid has a block for each source and tile. Without this bound ptxas
// takes more registers, or spills.
__global__ void __launch_bounds__(kThreads, 3) assign_rows(const AssignRowsParams p) {
    extern __shared__ __align__(16) char dynamic_smem[];
    __shared__ int rows_before;
    const auto& b = p.context.buffer;
    const Watch& watch = p.context.watch;
    const int source = blockIdx.x / b.num_tiles, tile = blockIdx.x % b.num_tiles;
    ptx::await_kernel_before();
    ptx::let_next_kernel_start();  // it begins with what needs no rows
    const uint64_t epoch = current_epoch(watch.state, Phase::kRoute);
    Smem smem(dynamic_smem, b.num_local_experts);
    layout::HandleView handle(p.layout.words, p.context.handle);

    const int words = 3 * (b.num_local_experts + 1) + b.num_local_experts * kMaskWords;
    for (int i = threadIdx.x; i < words; i += kThreads) smem.before[i] = 0;
    const Stopwatch waiting(p.context.trace);
    if (!wait_all_flags(p.context.mine(), b, Phase::kRoute, p.num_publish_blocks, epoch,
                        b.topk & 0xFFFF, watch) ||
        (blockIdx.x == 0 && !await_call(p, handle, epoch))) {
        if (blockIdx.x == 0) report_nothing(p.layout, b.num_local_experts);
        return;
    }
    waiting.stop(Span::kAwaitRouting, epoch);
    const Stopwatch assigning(p.context.trace);
    sum_counts(p, smem, source, tile, epoch);
    __syncthreads();
    if (warp_id() == 0) {
        int rows = scan_experts(p, smem);
        if (lane_id() == 0) {
            rows_before = rows;
            if (tile == 0) handle.source_first[source] = smem.before[b.num_local_experts];
        }
    }
    __syncthreads();
    if (blockIdx.x == 0) report(p, smem, handle);
    list_copies(p, smem, handle, source, tile, rows_before, epoch);
    assigning.stop(Span::kAssignRows, epoch);

    if (is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kRoute, epoch);
    }
}

}  // namespace

void launch_assign_rows(const AssignRowsParams& p, cudaStream_t stream) {
    const auto& b = p.context.buffer;
    launch(kKernel<assign_rows>, p, b.num_ranks * b.num_tiles, kThreads,
           Smem::bytes(b.num_local_experts), stream, {/*behind_ours=*/true});
}

}  // namespace hybrid_ep::kernels
