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

// The warps of a ring: the walker looks up what the loader loads, the adders add.
enum Role { kWalker = 0, kLoader = 1, kFirstAdder = 2 };
constexpr int kRingThreads = (kFirstAdder + kAdderWarps) * kWarp;
constexpr int kThreads = layout::kSumRings * kRingThreads;

struct Smem {
    SlotHandover slots[layout::kSumRings];
    CopyBatches copies[layout::kSumRings];

    // The whole block.
    __device__ void init(int num_slots) {
        if (threadIdx.x == 0) {
            for (int ring = 0; ring < layout::kSumRings; ++ring) {
                slots[ring].init(num_slots, kAdderWarps);
                copies[ring].handover.init(CopyBatches::kSize, 1);
            }
        }
        __syncthreads();
    }
};

__host__ __device__ uint32_t combine_signature(int row_bytes, bool has_values) {
    return layout::RecordLayout{row_bytes, 0, has_values ? 4 : 0}.signature();
}

// ---- push_sums

// The whole warp: hands on batches of copies with the weights of their rows; the values go home
// from here.
__device__ void walk_copies(const PushSumsParams& p, CopyWalk walk, CopyBatches& batches) {
    Turn turn;
    for (bool more = true; more; turn.advance(CopyBatches::kSize)) {
        CopyBatch& batch = batches.batch[turn.at];
        batches.handover.await_free(turn);
        walk.next(batch);
        if (p.weights != nullptr) {
            for (int i = lane_id(); i < batch.num_rows; i += kWarp) {
                batch.weight[i] = __ldg(&p.weights[batch.row[i]]);
            }
        }
        if (p.values != nullptr && lane_id() < batch.num_copies) {
            const layout::Copy& copy = batch.copy[lane_id()];
            char* home = p.context.peers.base[batch.source[lane_id()]];
            auto* values = reinterpret_cast<float*>(home + p.context.buffer.values_of(copy.token)) +
                           copy.first_place;
            const int* row = &batch.row[batch.first_row[lane_id()]];
            for (int i = 0; i < copy.num_places; ++i) {
                values[i] = i < copy.num_rows ? __ldg(&p.values[row[i]]) : 0.f;
            }
        }
        more = batch.num_copies > 0;
        __syncwarp();
        if (lane_id() == 0) batches.handover.filled(turn);
    }
}

// What the loader takes from the batches, job by job.
struct PushJobs {
    const PushSumsParams& p;
    CopyBatches& batches;
    Turn turn{};
    int next_copy = 0, num_copies = 0;

    __device__ bool next(SumJob& job) {
        if (next_copy == num_copies) {
            if (num_copies > 0) {
                __syncwarp();
                if (lane_id() == 0) batches.handover.freed(turn.at);
                turn.advance(CopyBatches::kSize);
            }
            batches.handover.await_filled(turn);
            num_copies = batches.batch[turn.at].num_copies;
            next_copy = 0;
            if (num_copies == 0) return false;
        }
        const CopyBatch& batch = batches.batch[turn.at];
        const layout::Copy& copy = batch.copy[next_copy];
        const int at = batch.first_row[next_copy] + min(lane_id(), max(copy.num_rows - 1, 0));
        job.num_rows = copy.num_rows;
        job.row = copy.num_rows > 0 ? p.rows + int64_t(batch.row[at]) * p.row_bytes : nullptr;
        job.weight = copy.num_rows > 0 ? batch.weight[at] : 0.f;
        job.sum = p.context.peers.base[batch.source[next_copy]] +
                  p.context.buffer.inbox_row(copy.token, copy.inbox_slot, p.row_bytes);
        ++next_copy;
        return true;
    }
};

template <typename T, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1) push_sums(const __grid_constant__ PushSumsParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    const auto& b = p.context.buffer;
    const uint64_t epoch = current_epoch(p.context.watch.state, Phase::kCombine);
    const Stopwatch waiting(p.context.trace);
    if (!wait_all_flags(p.context.peers.base[p.context.rank], b, Phase::kInboxFree, 1, epoch - 1,
                        epoch == 1 ? 0 : kFreeSignature, p.context.watch)) {
        return;
    }
    waiting.stop(Span::kAwaitInbox, epoch);
    const Stopwatch pushing(p.context.trace);
    const int ring = threadIdx.x / kRingThreads, role = warp_id() % (kRingThreads / kWarp);
    const Slots slots(dynamic_smem, p.ring, ring);
    smem.init(slots.size());
    if (role == kWalker) {
        const layout::HandleView handle(p.words, p.context.handle);
        const CopyWalk walk(handle, b.num_ranks, p.context.rank,
                            &p.context.watch.state->steps_taken, gridDim.x * layout::kSumRings);
        walk_copies(p, walk, smem.copies[ring]);
    } else if (role == kLoader) {
        PushJobs jobs{p, smem.copies[ring]};
        load_terms(jobs, slots, smem.slots[ring], p.slices, p.row_bytes);
    } else {
        const int adder = threadIdx.x % kRingThreads - kFirstAdder * kWarp;
        Adder<T, kWeighted>(slots, smem.slots[ring], adder, 1 + ring).run();
    }
    ptx::let_next_kernel_start();
    signal_all_ranks(p.context.peers, b, Phase::kCombine, p.context.rank, blockIdx.x, epoch,
                     combine_signature(p.row_bytes, p.values != nullptr));
    pushing.stop(Span::kPushSums, epoch);
}

// ---- sum_at_home

// What the loader loads: the rows in the inbox of each token that is dealt to it.
struct HomeJobs {
    const SumAtHomeParams& p;
    layout::HandleView handle;
    int64_t token;
    int step;
    int next_token = kWarp;  // of the 32 whose number of rows the lanes hold
    int lane_rows = 0;

    __device__ bool next(SumJob& job) {
        if (next_token == kWarp) look_up();
        if (token >= p.num_tokens) return false;
        const auto& b = p.context.buffer;
        job.num_rows = __shfl_sync(kAllLanes, lane_rows, next_token);
        job.row = p.context.peers.base[p.context.rank] +
                  b.inbox_row(token, min(lane_id(), b.fanout - 1), p.row_bytes);
        job.weight = 0.f;
        job.sum = p.y + token * p.row_bytes;
        token += step;
        ++next_token;
        return true;
    }
    __device__ void look_up() {
        const int64_t mine = token + int64_t(lane_id()) * step;
        lane_rows = mine < p.num_tokens ? handle.num_copies(mine) : 0;
        next_token = 0;
    }
};

// Each slot of my tokens gets the value of its place.
__device__ void take_values(const SumAtHomeParams& p, const layout::HandleView& handle, int taker,
                            int num_takers) {
    const auto& b = p.context.buffer;
    const char* mine = p.context.peers.base[p.context.rank];
    const int64_t count = int64_t(p.num_tokens) * b.topk;
    for (int64_t i = int64_t(taker) * kWarp + lane_id(); i < count; i += num_takers * kWarp) {
        const int place = handle.places[i];
        auto* values = reinterpret_cast<const float*>(mine + b.values_of(i / b.topk));
        p.values[i] = place >= 0 ? values[place] : 0.f;
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    sum_at_home(const __grid_constant__ SumAtHomeParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    const auto& b = p.context.buffer;
    const Watch& watch = p.context.watch;
    ptx::await_kernel_before();
    const uint64_t epoch = current_epoch(watch.state, Phase::kCombine);
    const Stopwatch waiting(p.context.trace);
    if (!wait_all_flags(p.context.peers.base[p.context.rank], b, Phase::kCombine, p.num_blocks,
                        epoch, combine_signature(p.row_bytes, p.values != nullptr), watch)) {
        return;
    }
    waiting.stop(Span::kAwaitSums, epoch);
    const Stopwatch summing(p.context.trace);
    const int ring = threadIdx.x / kRingThreads, role = warp_id() % (kRingThreads / kWarp);
    const int taker = blockIdx.x * layout::kSumRings + ring;
    const int num_takers = gridDim.x * layout::kSumRings;
    const layout::HandleView handle(p.words, p.context.handle);
    const Slots slots(dynamic_smem, p.ring, ring);
    smem.init(slots.size());
    if (role == kWalker) {
        if (p.values != nullptr) take_values(p, handle, taker, num_takers);
    } else if (role == kLoader) {
        HomeJobs jobs{p, handle, taker, num_takers};
        load_terms(jobs, slots, smem.slots[ring], p.slices, p.row_bytes);
    } else {
        const int adder = threadIdx.x % kRingThreads - kFirstAdder * kWarp;
        Adder<T, false>(slots, smem.slots[ring], adder, 1 + ring).run();
    }
    __syncthreads();
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

template <bool kWeighted>
Kernel<PushSumsParams> pick_push(SumType type) {
    return pick<PushSumsParams>(type, push_sums<__nv_bfloat16, kWeighted>,
                                push_sums<__half, kWeighted>, push_sums<float, kWeighted>);
}

}  // namespace

void launch_push_sums(const PushSumsParams& p, cudaStream_t stream) {
    auto kernel = p.weights != nullptr ? pick_push<true>(p.type) : pick_push<false>(p.type);
    launch(kernel, p, p.num_blocks, kThreads, layout::dynamic_smem_bytes(p.ring, layout::kSumRings),
           stream);
}

void launch_sum_at_home(const SumAtHomeParams& p, cudaStream_t stream) {
    auto kernel = pick<SumAtHomeParams>(p.type, sum_at_home<__nv_bfloat16>, sum_at_home<__half>,
                                        sum_at_home<float>);
    launch_behind_ours(kernel, p, p.num_blocks, kThreads,
                       layout::dynamic_smem_bytes(p.ring, layout::kSumRings), stream);
}

}  // namespace hybrid_ep::kernels
