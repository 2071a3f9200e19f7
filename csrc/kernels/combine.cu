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

constexpr int kJobs = 16;  // of a ring: looked up and not loaded yet

// A copy whose rows are to be summed.
struct PushJob {
    static constexpr int kEnd = -1;

    char* sum;     // in the inbox of its home
    int num_rows;  // kEnd: there is no more
    int row[layout::kMaxTopk];
    float weight[layout::kMaxTopk];
};

struct PushSmem {
    SlotHandover slots;
    Handover<kJobs> jobs;
    PushJob job[kJobs];
};

__host__ __device__ uint32_t combine_signature(int row_bytes, bool has_values) {
    return layout::RecordLayout{row_bytes, 0, has_values ? 4 : 0}.signature();
}

// ---- push_sums

// Takes the next copies, a lane each, and lists them with their rows and weights; the values go
// home from here.
class Walker {
  public:
    __device__ Walker(const PushSumsParams& p, const CopyWalk& walk, PushSmem& smem)
        : p_(p), walk_(walk), smem_(smem) {}

    __device__ void run() {
        CopyWalk::Taken mine;
        int num_jobs = 0;
        while (walk_.take(kJobs / 2, mine)) {
            const uint32_t have = __ballot_sync(kAllLanes, mine.valid);
            if (mine.valid) list(mine, num_jobs + __popc(have & lanes_below()));
            num_jobs += __popc(have);
            __syncwarp();
        }
        if (lane_id() == 0) {
            begin_job(num_jobs).num_rows = PushJob::kEnd;
            smem_.jobs.filled(turn(num_jobs));
        }
    }

  private:
    // One lane.
    __device__ void list(const CopyWalk::Taken& mine, int at) {
        const layout::Copy& copy = mine.copy;
        const auto& b = p_.context.buffer;
        char* home = p_.context.peers.base[mine.source];
        PushJob& job = begin_job(at);
        job.sum = home + b.inbox_row(copy.token, copy.inbox_slot, p_.row_bytes);
        job.num_rows = copy.num_rows;
#pragma unroll 8
        for (int i = 0; i < copy.num_rows; ++i) job.row[i] = __ldg(&mine.rows[i]);
        if (p_.weights != nullptr) {
#pragma unroll 8
            for (int i = 0; i < copy.num_rows; ++i) job.weight[i] = __ldg(&p_.weights[job.row[i]]);
        }
        if (p_.values != nullptr) {
            auto* values =
                reinterpret_cast<float*>(home + b.values_of(copy.token)) + copy.first_place;
#pragma unroll 8
            for (int i = 0; i < copy.num_places; ++i) {
                values[i] = i < copy.num_rows ? __ldg(&p_.values[job.row[i]]) : 0.f;
            }
        }
        smem_.jobs.filled(turn(at));
    }

    __device__ static Turn turn(int job) { return Turn::of(job, kJobs); }
    __device__ PushJob& begin_job(int job) {
        smem_.jobs.await_free(turn(job));
        return smem_.job[job % kJobs];
    }

    const PushSumsParams& p_;
    CopyWalk walk_;
    PushSmem& smem_;
};

// The jobs as the loader takes them.
struct PushJobs {
    const PushSumsParams& p;
    PushSmem& smem;
    Turn turn{};

    __device__ bool next(SumJob& sum) {
        smem.jobs.await_filled(turn);
        const PushJob& job = smem.job[turn.at];
        if (job.num_rows == PushJob::kEnd) return false;
        const int mine = min(lane_id(), max(job.num_rows - 1, 0));
        sum.num_rows = job.num_rows;
        sum.row = p.rows + int64_t(job.row[mine]) * p.row_bytes;
        sum.weight = job.weight[mine];
        sum.sum = job.sum;
        __syncwarp();
        if (lane_id() == 0) smem.jobs.freed(turn.at);
        turn.advance(kJobs);
        return true;
    }
};

template <typename T, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1) push_sums(const __grid_constant__ PushSumsParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ PushSmem smem[layout::kSumRings];
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
    if (threadIdx.x < layout::kSumRings) {
        smem[threadIdx.x].slots.init(slots.size(), kAdderWarps);
        smem[threadIdx.x].jobs.init(kJobs, 1);
    }
    __syncthreads();
    if (role == kWalker) {
        const layout::HandleView handle(p.words, p.context.handle);
        const CopyWalk walk(handle, b.num_ranks, p.context.rank,
                            &p.context.watch.state->steps_taken, gridDim.x * layout::kSumRings);
        Walker(p, walk, smem[ring]).run();
    } else if (role == kLoader) {
        PushJobs jobs{p, smem[ring]};
        load_terms(jobs, slots, smem[ring].slots, p.slices, p.row_bytes);
    } else {
        const int adder = threadIdx.x % kRingThreads - kFirstAdder * kWarp;
        Adder<T, kWeighted>(slots, smem[ring].slots, adder, 1 + ring).run();
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
    __shared__ SlotHandover handovers[layout::kSumRings];
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
    if (threadIdx.x < layout::kSumRings) handovers[threadIdx.x].init(slots.size(), kAdderWarps);
    __syncthreads();
    if (role == kWalker) {
        if (p.values != nullptr) take_values(p, handle, taker, num_takers);
    } else if (role == kLoader) {
        HomeJobs jobs{p, handle, taker, num_takers};
        load_terms(jobs, slots, handovers[ring], p.slices, p.row_bytes);
    } else {
        const int adder = threadIdx.x % kRingThreads - kFirstAdder * kWarp;
        Adder<T, false>(slots, handovers[ring], adder, 1 + ring).run();
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
