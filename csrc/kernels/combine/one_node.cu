// Combine, in one kernel: sums of a rank's expert rows are pushed home, and added there.
//
//   rows of a copy --sum over local experts--> inbox of the home [token, other rank], a flag   push
//   own rows of a token --sum--> rounded, among the sums of other ranks in my inbox,
//                                in rank order --sum--> y[token]                              home
//
// Half of the blocks push first, the others add at home what has come; once all is pushed, the
// first help them. Pushing waits for no rank, and the first block that gets an SM pushes until
// nothing is left: so adding at home always ends, however few blocks are resident. The inbox is one
// per Buffer: a pusher first looks whether the home has read the call before. `values`, one float
// per row, ride along unsummed: they are the gradients of the weights.
#include "device/copy_walk.cuh"
#include "device/load_then_store.cuh"
#include "kernels/announce.cuh"
#include "kernels/combine/block.cuh"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using layout::Phase;

constexpr uint32_t kFreeSignature = 1;
constexpr int kMostPushers = 22;

__host__ __device__ uint32_t signature(const CombineParams& p) {
    return layout::RecordLayout{p.summed.row_bytes, 0, p.summed.values != nullptr ? 4 : 0,
                                layout::kind_of_call(int(p.summed.type), p.summed.num_sms)}
        .signature();
}

// Lists sums as jobs, a lane each, with their rows and weights, for the rings in turn; the values
// go home from here.
class Walker {
  public:
    __device__ Walker(const CombineParams& p, SumJobs& jobs, uint64_t epoch)
        : p_(p),
          buffer_(p.context.buffer),
          handle_(p.summed.words, p.context.handle),
          jobs_(jobs),
          epoch_(epoch) {}

    // False: a peer did not come.
    __device__ bool run(bool pushes) {
        if (pushes) push();
        return add_at_home();
    }

  private:
    static constexpr int kMostTaken = kRings * SumJobs::kMostListed;

    __device__ void push() {
        CopyWalk walk(handle_, buffer_.num_ranks, p_.context.rank, buffer_.num_ranks - 1,
                      &p_.context.watch.state->steps_taken, gridDim.x, kMostTaken);
        CopyWalk::Taken mine;
        while (walk.take(mine)) {
            const uint32_t have = __ballot_sync(kAllLanes, mine.valid);
            if (mine.valid) list_push(mine, jobs_.in_turn(__popc(have & lanes_below())));
            jobs_.advance_in_turn(__popc(have));
        }
    }

    // One lane.
    __device__ void list_push(const CopyWalk::Taken& mine, const SumJobs::Position& at) {
        const layout::Copy& copy = mine.copy;
        char* home = p_.context.peers.base[mine.source];
        send_values(copy, mine.rows, home);
        SumJob& job = jobs_.begin(at);
        job.sum.to = home + buffer_.inbox_row(copy.token, copy.others_before, p_.summed.row_bytes);
        job.sum.note = reinterpret_cast<uint64_t>(flag_in(home, copy.token, copy.others_before));
        job.sum.num_sums = 0;
        list_rows(job, copy.num_rows, mine.rows);
        jobs_.end(at);
    }

    __device__ bool add_at_home() {
        Takes takes(&p_.context.watch.state->tokens_taken, p_.summed.num_tokens, gridDim.x, kRings,
                    kMostTaken);
        int first, count;
        while (takes.take(first, count)) {
            const int64_t token = first + lane_id();
            const int own = lane_id() < count ? handle_.own_copies[token] : -1;
            layout::Copy copy{};
            if (own >= 0) copy = handle_.copies[own];
            const bool mine = lane_id() < count;
            const SumJobs::Position at = jobs_.in_turn(lane_id());
            if (mine) list_home(token, own >= 0, copy, at);
            if (!await_sums(mine, token)) return false;
            if (mine) jobs_.end(at);
            jobs_.advance_in_turn(count);
            if (!mine || p_.summed.values == nullptr) continue;
            send_values(copy, handle_.rows + copy.first_row, p_.context.mine());
            take_values(token);
        }
        return true;
    }

    // The whole warp: until the other ranks' sums of the lane's token are in the inbox.
    __device__ bool await_sums(bool mine, int64_t token) {
        const Stopwatch waiting(p_.context.trace);
        const int num_others = mine ? __ldg(&handle_.num_others[token]) : 0;
        bool good = true;
        for (int other = 0; good && other < num_others; ++other) {
            const int peer = handle_.others[token * buffer_.most_others + other];
            good = wait_flag(flag_in(p_.context.mine(), token, other), epoch_, signature(p_),
                             p_.context.watch, Phase::kCombine, peer, int(token));
        }
        ptx::fence_proxy_async();
        if (lane_id() == 0) waiting.note(Span::kAwaitSums, epoch_);
        return __all_sync(kAllLanes, good);
    }

    // One lane; the job is not filled yet.
    __device__ void list_home(int64_t token, bool has_own, const layout::Copy& copy,
                              const SumJobs::Position& at) {
        SumJob& job = jobs_.begin(at);
        job.sum.to = p_.summed.y + token * p_.summed.row_bytes;
        job.sum.note = 0;
        job.sum.num_sums = handle_.num_others[token];
        job.sum.num_before_own = has_own ? copy.others_before : -1;
        list_rows(job, copy.num_rows, handle_.rows + copy.first_row);
        job.sums = p_.context.mine() + buffer_.inbox_row(token, 0, p_.summed.row_bytes);
        for (int i = 0; i < job.sum.num_sums; ++i) job.term[copy.num_rows + i] = i * row_units();
    }

    __device__ uint32_t row_units() const { return uint32_t(p_.summed.row_bytes / 16); }

    __device__ void list_rows(SumJob& job, int num_rows, const int32_t* rows) const {
        job.sum.num_rows = num_rows;
        job.rows = p_.summed.rows;
#pragma unroll 8
        for (int i = 0; i < num_rows; ++i) job.term[i] = uint32_t(__ldg(&rows[i])) * row_units();
        if (p_.summed.weights == nullptr) return;
#pragma unroll 8
        for (int i = 0; i < num_rows; ++i)
            job.weight[i] = __ldg(&p_.summed.weights[__ldg(&rows[i])]);
    }

    // To the places of the copy's experts; dropped rows have the value 0.
    __device__ void send_values(const layout::Copy& copy, const int32_t* rows, char* home) const {
        if (p_.summed.values == nullptr) return;
        auto* values = reinterpret_cast<float*>(home + buffer_.values_of(copy.token));
        load_then_store(
            copy.num_places,
            [&](int i) { return i < copy.num_rows ? __ldg(&p_.summed.values[rows[i]]) : 0.f; },
            [&](int i, float value) { values[copy.first_place + i] = value; });
    }

    // Each top-k slot of my token gets the value of its place.
    __device__ void take_values(int64_t token) const {
        auto* values = reinterpret_cast<const float*>(p_.context.mine() + buffer_.values_of(token));
        const int8_t* places = handle_.places + token * buffer_.topk;
        float* home_values = p_.summed.home_values + token * buffer_.topk;
        load_then_store(
            buffer_.topk,
            [&](int k) {
                const int place = __ldg(&places[k]);
                return place >= 0 ? values[place] : 0.f;
            },
            [&](int k, float value) { home_values[k] = value; });
    }

    __device__ uint64_t* flag_in(char* home, int64_t token, int other) const {
        return reinterpret_cast<uint64_t*>(home + buffer_.sum_flag(token, other));
    }

    const CombineParams& p_;
    const layout::BufferLayout& buffer_;
    layout::HandleView handle_;
    SumJobs& jobs_;
    uint64_t epoch_;
};

// One warp of the first block, while the others look whether the inbox is free.
__device__ void announce_call(const CombineParams& p, uint64_t& announcement) {
    if (__any_sync(kAllLanes, has_fault(p.context.watch.state))) return;
    const uint64_t mine = announcement_of(p.context, Phase::kCombine, p.summed.words, signature(p));
    if (lane_id() == 0) announcement = mine;
    announce(p.context, Phase::kCombine, mine, lane_id(), kWarp);
}

// Of the block that is the n-th to start, from 0. Invariant "no wait inside a grid": whichever
// block gets an SM first pushes.
__device__ bool is_pusher(int n) {
    const int pushers = min(int(gridDim.x + 1) / 2, kMostPushers);
    return n * pushers % int(gridDim.x) < pushers;
}

// One warp. It ends when all is stored, so it knows what the ring did until when.
__device__ void tell_homes(const CombineParams& p, RingSmem& ring, uint64_t epoch) {
    const Trace& trace = p.context.trace;
    const uint64_t begin = ptx::global_timer_ns();
    const uint64_t value = flag_value(epoch, signature(p));
    const uint64_t pushed = announce_sums(ring.sums, p.ring.num_slots, [value](uint64_t note) {
        if (note != 0) ptx::store_relaxed(reinterpret_cast<uint64_t*>(note), value);
    });
    if (lane_id() != 0) return;
    if (pushed > 0) note(trace, Span::kPushSums, epoch, begin, pushed);
    note(trace, Span::kSumAtHome, epoch, max(begin, pushed), ptx::global_timer_ns());
}

template <typename T, bool kWeighted>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ CombineSmem smem;
    __shared__ int nth;                // to start, of the blocks
    __shared__ uint64_t announcement;  // of the first block
    const auto& b = p.context.buffer;
    const Watch& watch = p.context.watch;
    const uint64_t epoch = current_epoch(watch.state, Phase::kCombine);
    const Stopwatch waiting(p.context.trace);
    if (threadIdx.x == 0) nth = int(atomicAdd(&watch.state->blocks_started, 1u));
    if (blockIdx.x == 0 && warp_id() == 1) announce_call(p, announcement);
    // invariant "inbox free": the homes have read what the call before left there
    if (!wait_all_flags(p.context.mine(), b, Phase::kInboxFree, 1, epoch - 1,
                        epoch == 1 ? 0 : kFreeSignature, watch)) {
        return;
    }
    waiting.stop(Span::kAwaitInbox, epoch);

    init(smem, p.ring, false);
    __syncthreads();
    run_combine<T, kWeighted>(
        p.ring, p.slices, p.summed.row_bytes, dynamic_smem, smem,
        [&](SumJobs& jobs) { return Walker(p, jobs, epoch).run(is_pusher(nth)); },
        [&](RingSmem& ring) { tell_homes(p, ring, epoch); });
    __syncthreads();
    if (smem.failed) return;
    // invariant "calls in step": all ranks make this call, even those that nothing came from
    if (blockIdx.x == 0 && !await_all_by_block(p.context, Phase::kCombine, epoch, announcement)) {
        return;
    }
    if (is_last_block(watch.state)) {  // invariant "inbox free": all blocks have read mine
        if (threadIdx.x == 0) close_call(watch.state, Phase::kCombine, epoch);
        signal_all_ranks(p.context.peers, b, Phase::kInboxFree, p.context.rank, 0, epoch,
                         kFreeSignature);
    }
}

}  // namespace

void launch_combine(const CombineParams& p, cudaStream_t stream) {
    const auto kernel = for_type(p.summed.type, [&](auto t) {
        return p.summed.weights != nullptr ? kKernel<combine<decltype(t), true>>
                                           : kKernel<combine<decltype(t), false>>;
    });
    launch(kernel, p, p.num_blocks, kCombineThreads, layout::dynamic_smem_bytes(p.ring, kRings),
           stream, kInPairs);
}

}  // namespace hybrid_ep::kernels
