// Combine, in two kernels: sums of a rank's expert rows are pushed home, and added there.
//
//   rows of a copy --sum over local experts--> inbox of the home rank [token, slot]     push_sums
//   inbox rows of a token --sum over ranks, in rank order--> y[token]                   sum_at_home
//
// The inbox is one per Buffer: a pusher first looks whether the home has read the call before.
// `values`, one float per row, ride along unsummed: they are the gradients of the weights.
#include "device/copy_walk.cuh"
#include "device/flag.cuh"
#include "device/sum_rows.cuh"
#include "device/trace.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using layout::Phase;

constexpr uint32_t kFreeSignature = 1;

__host__ __device__ uint32_t combine_signature(int row_bytes, bool has_values) {
    return layout::RecordLayout{row_bytes, 0, has_values ? 4 : 0}.signature();
}

struct PushWalk {
    const PushSumsParams& p;
    CopyWalk copies;

    __device__ bool next(SumJob& job) {
        layout::Copy copy;
        int source, row;
        if (!copies.next(copy, source, row)) return false;
        const auto& b = p.context.buffer;
        char* home = p.context.peers.base[source];
        const bool has_row = lane_id() < copy.num_rows;
        job.num_rows = copy.num_rows;
        job.row = p.rows + int64_t(row) * p.row_bytes;
        job.weight = p.weights != nullptr && has_row ? p.weights[row] : 0.f;
        job.sum = home + b.inbox_row(copy.token, copy.inbox_slot, p.row_bytes);
        if (p.values != nullptr && lane_id() < copy.num_places) {
            auto* values = reinterpret_cast<float*>(home + b.values_of(copy.token));
            values[copy.first_place + lane_id()] = has_row ? p.values[row] : 0.f;
        }
        return true;
    }
};

struct HomeWalk {
    const SumAtHomeParams& p;
    layout::HandleView handle;
    int64_t token;
    int num_warps;

    __device__ bool next(SumJob& job) {
        if (token >= p.num_tokens) return false;
        const auto& b = p.context.buffer;
        char* mine = p.context.peers.base[p.context.rank];
        job.num_rows = handle.home_copies[token];
        job.row = mine + b.inbox_row(token, lane_id(), p.row_bytes);
        job.sum = p.y + token * p.row_bytes;
        if (p.values != nullptr && lane_id() < b.topk) {
            int place = handle.places[token * b.topk + lane_id()];
            auto* values = reinterpret_cast<const float*>(mine + b.values_of(token));
            p.values[token * b.topk + lane_id()] = place >= 0 ? values[place] : 0.f;
        }
        token += num_warps;
        return true;
    }
};

template <typename T>
__global__ void __launch_bounds__(layout::kMaxRingWarps* kWarp)
    push_sums(const __grid_constant__ PushSumsParams p) {
    using Role = SumRows<T, PushWalk>;
    static_assert(sizeof(typename Role::Header) <= layout::kStageHeaderBytes);
    extern __shared__ __align__(128) char dynamic_smem[];
    const auto& b = p.context.buffer;
    const uint64_t epoch = current_epoch(p.context.watch.state, Phase::kCombine);
    const Stopwatch waiting(p.context.trace);
    if (!wait_all_flags(p.context.peers.base[p.context.rank], b, Phase::kInboxFree, 1, epoch - 1,
                        epoch == 1 ? 0 : kFreeSignature, p.context.watch)) {
        return;
    }
    waiting.stop(Span::kAwaitInbox, epoch);
    const Stopwatch pushing(p.context.trace);
    const int warp = blockIdx.x * warps_per_block() + warp_id(),
              num_warps = gridDim.x * warps_per_block();
    layout::HandleView handle(p.words, p.context.handle);
    Ring ring(dynamic_smem, p.ring);
    Role role{{p, CopyWalk(handle, b.num_ranks, p.context.rank, warp, num_warps)},
              p.row_bytes,
              p.ring.stage_bytes,
              ring.header_offset(),
              p.weights != nullptr};
    ring.run(role);
    signal_all_ranks(p.context.peers, b, Phase::kCombine, p.context.rank, blockIdx.x, epoch,
                     combine_signature(p.row_bytes, p.values != nullptr));
    pushing.stop(Span::kPushSums, epoch);
}

template <typename T>
__global__ void __launch_bounds__(layout::kMaxRingWarps* kWarp)
    sum_at_home(const __grid_constant__ SumAtHomeParams p) {
    using Role = SumRows<T, HomeWalk>;
    extern __shared__ __align__(128) char dynamic_smem[];
    const auto& b = p.context.buffer;
    const Watch& watch = p.context.watch;
    const uint64_t epoch = current_epoch(watch.state, Phase::kCombine);
    const Stopwatch waiting(p.context.trace);
    if (!wait_all_flags(p.context.peers.base[p.context.rank], b, Phase::kCombine, p.num_blocks,
                        epoch, combine_signature(p.row_bytes, p.values != nullptr), watch)) {
        return;
    }
    waiting.stop(Span::kAwaitSums, epoch);
    const Stopwatch summing(p.context.trace);
    const int warp = blockIdx.x * warps_per_block() + warp_id(),
              num_warps = gridDim.x * warps_per_block();
    Ring ring(dynamic_smem, p.ring);
    Role role{{p, layout::HandleView(p.words, p.context.handle), warp, num_warps},
              p.row_bytes,
              p.ring.stage_bytes,
              ring.header_offset(),
              false};
    ring.run(role);
    summing.stop(Span::kSumAtHome, epoch);
    if (is_last_block(watch.state)) {
        if (threadIdx.x == 0) close_call(watch.state, Phase::kCombine, epoch);
        signal_all_ranks(p.context.peers, b, Phase::kInboxFree, p.context.rank, 0, epoch,
                         kFreeSignature);
    }
}

template <typename Params>
using Kernel = void (*)(Params);

template <typename Params>
Kernel<Params> pick(SumType type, Kernel<Params> bf16, Kernel<Params> fp16, Kernel<Params> fp32) {
    return type == SumType::kBf16 ? bf16 : type == SumType::kFp16 ? fp16 : fp32;
}

}  // namespace

void launch_push_sums(const PushSumsParams& p, cudaStream_t stream) {
    auto kernel =
        pick<PushSumsParams>(p.type, push_sums<__nv_bfloat16>, push_sums<__half>, push_sums<float>);
    launch(kernel, p, p.num_blocks, p.ring.num_warps * kWarp, p.ring.smem_bytes(), stream);
}

void launch_sum_at_home(const SumAtHomeParams& p, cudaStream_t stream) {
    auto kernel = pick<SumAtHomeParams>(p.type, sum_at_home<__nv_bfloat16>, sum_at_home<__half>,
                                        sum_at_home<float>);
    launch(kernel, p, p.num_blocks, p.ring.num_warps * kWarp, p.ring.smem_bytes(), stream);
}

}  // namespace hybrid_ep::kernels
