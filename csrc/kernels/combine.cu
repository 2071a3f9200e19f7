// Combine, in one kernel: sums of a rank's expert rows are pushed home, and added there.
//
//   rows of a copy --sum over local experts--> inbox of the home rank [token, slot], a flag   push
//   own rows of a token --sum--> rounded, among the sums of other ranks in my inbox,
//                                in rank order --sum--> y[token]                              home
//
// Half of the blocks push first, the others add at home what has come; who has pushed all helps
// them. Pushing waits for nobody, so adding at home always ends.
// The inbox is one per Buffer: a pusher first looks whether the home has read the call before.
// `values`, one float per row, ride along unsummed: they are the gradients of the weights.
#include "device/copy_walk.cuh"
#include "device/sum_rows.cuh"
#include "device/trace.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using layout::Phase;

constexpr uint32_t kFreeSignature = 1;

constexpr int kRings = layout::kSumRings;

// The warps of a block: the walker looks up what the loaders load. Then ring by ring: the herald
// sets the flags of what the adders have stored.
enum Role { kWalker = 0, kFirstOfRings = 1 };
enum RingRole { kLoader = 0, kHerald = 1, kFirstAdder = 2, kRingWarps = kFirstAdder + kAdderWarps };
constexpr int kThreads = (kFirstOfRings + kRings * kRingWarps) * kWarp;

constexpr int kMostPushers = 22;
constexpr int kJobs = 16;  // of a ring: looked up and not loaded yet

// A sum, and where its terms are.
struct Job {
    Sum sum;
    const char* inbox;  // of its token
    int row[layout::kMaxTopk];
    float weight[layout::kMaxTopk];
};

struct RingSmem {
    SumSmem sums;
    Handover<kJobs> jobs;
    Job job[kJobs];
};

struct Smem {
    RingSmem ring[kRings];
    bool failed;  // a peer did not come: the call stays open
};
static_assert(sizeof(Smem) <= layout::kStaticSmemBytes);

__host__ __device__ uint32_t signature(const CombineParams& p) {
    return layout::RecordLayout{p.io.row_bytes, 0, p.io.values != nullptr ? 4 : 0}.signature();
}

// Lists sums as jobs, a lane each, with their rows and weights, for the rings in turn; the values
// go home from here.
class Walker {
  public:
    __device__ Walker(const CombineParams& p, Smem& smem, uint64_t epoch)
        : p_(p),
          buffer_(p.context.buffer),
          handle_(p.words, p.context.handle),
          smem_(smem),
          epoch_(epoch) {}

    __device__ void run(bool pushes) {
        if (pushes) push();
        add_at_home();
        __syncwarp();  // a job that was listed in vain may be written over
        if (lane_id() < kRings) {
            begin_job(num_jobs_ + lane_id()).sum.to = nullptr;
            end_job(num_jobs_ + lane_id());
        }
    }

  private:
    static constexpr int kMostTaken = kRings * kJobs / 2;

    __device__ void push() {
        CopyWalk walk(handle_, buffer_.num_ranks, p_.context.rank, buffer_.num_ranks - 1,
                      &p_.context.watch.state->steps_taken, gridDim.x, kMostTaken);
        CopyWalk::Taken mine;
        while (walk.take(mine)) {
            const uint32_t have = __ballot_sync(kAllLanes, mine.valid);
            if (mine.valid) list_push(mine, num_jobs_ + __popc(have & lanes_below()));
            num_jobs_ += __popc(have);
            __syncwarp();
        }
    }

    // One lane.
    __device__ void list_push(const CopyWalk::Taken& mine, int at) {
        const layout::Copy& copy = mine.copy;
        char* home = p_.context.peers.base[mine.source];
        send_values(copy, mine.rows, home);
        Job& job = begin_job(at);
        job.sum.to = home + buffer_.inbox_row(copy.token, copy.inbox_slot, p_.io.row_bytes);
        job.sum.flag = flag_in(home, copy.token, copy.inbox_slot);
        job.sum.num_sums = 0;
        list_rows(job, copy.num_rows, mine.rows);
        end_job(at);
    }

    __device__ void add_at_home() {
        Takes takes(&p_.context.watch.state->tokens_taken, p_.io.num_tokens, gridDim.x, kRings,
                    kMostTaken);
        int first, count;
        while (takes.take(first, count)) {
            const int64_t token = first + lane_id();
            const int own = lane_id() < count ? handle_.own_copies[token] : -1;
            layout::Copy copy{};
            if (own >= 0) copy = handle_.copies[own];
            const bool mine = lane_id() < count;
            if (mine) list_home(token, own >= 0, copy, num_jobs_ + lane_id());
            if (!await_sums(mine, token)) return;
            if (mine && p_.io.values != nullptr) take_values(token);
            if (mine) end_job(num_jobs_ + lane_id());
            num_jobs_ += count;
            __syncwarp();
        }
    }

    // The whole warp: until the other ranks' sums of the lane's token are in the inbox.
    __device__ bool await_sums(bool mine, int64_t token) {
        const Stopwatch waiting(p_.context.trace);
        const int num_others = mine ? __ldg(&handle_.num_others[token]) : 0;
        bool good = true;
        for (int slot = 0; good && slot < num_others; ++slot) {
            const int peer = handle_.others[token * buffer_.most_others + slot];
            good = wait_flag(flag_in(p_.context.mine(), token, slot), epoch_, signature(p_),
                             p_.context.watch, Phase::kCombine, peer, int(token));
        }
        ptx::fence_proxy_async();
        good = __all_sync(kAllLanes, good);
        if (lane_id() == 0) {
            if (!good) smem_.failed = true;
            waiting.note(Span::kAwaitSums, epoch_);
        }
        return good;
    }

    // One lane; the job is not filled yet.
    __device__ void list_home(int64_t token, bool has_own, const layout::Copy& copy, int at) {
        const int32_t* rows = handle_.rows + copy.first_row;
        send_values(copy, rows, p_.context.mine());
        Job& job = begin_job(at);
        job.sum.to = p_.io.y + token * p_.io.row_bytes;
        job.sum.flag = nullptr;
        job.sum.num_sums = handle_.num_others[token];
        job.sum.place_of_own = has_own ? copy.inbox_slot : -1;
        job.inbox = p_.context.mine() + buffer_.inbox_row(token, 0, p_.io.row_bytes);
        list_rows(job, copy.num_rows, rows);
    }

    __device__ void list_rows(Job& job, int num_rows, const int32_t* rows) const {
        job.sum.num_rows = num_rows;
#pragma unroll 8
        for (int i = 0; i < num_rows; ++i) job.row[i] = __ldg(&rows[i]);
        if (p_.io.weights == nullptr) return;
#pragma unroll 8
        for (int i = 0; i < num_rows; ++i) job.weight[i] = __ldg(&p_.io.weights[job.row[i]]);
    }

    // To the places of the copy's experts; dropped rows have the value 0.
    __device__ void send_values(const layout::Copy& copy, const int32_t* rows, char* home) const {
        if (p_.io.values == nullptr) return;
        auto* values = reinterpret_cast<float*>(home + buffer_.values_of(copy.token));
#pragma unroll 8
        for (int i = 0; i < copy.num_places; ++i) {
            values[copy.first_place + i] = i < copy.num_rows ? __ldg(&p_.io.values[rows[i]]) : 0.f;
        }
    }

    // Each slot of my token gets the value of its place.
    __device__ void take_values(int64_t token) const {
        auto* values = reinterpret_cast<const float*>(p_.context.mine() + buffer_.values_of(token));
        for (int slot = 0; slot < buffer_.topk; ++slot) {
            const int place = handle_.places[token * buffer_.topk + slot];
            p_.io.home_values[token * buffer_.topk + slot] = place >= 0 ? values[place] : 0.f;
        }
    }

    __device__ uint64_t* flag_in(char* home, int64_t token, int slot) const {
        return reinterpret_cast<uint64_t*>(home + buffer_.sum_flag(token, slot));
    }
    __device__ static Turn turn(int job) { return Turn::of(job / kRings, kJobs); }
    __device__ Job& begin_job(int job) {
        RingSmem& ring = smem_.ring[job % kRings];
        ring.jobs.await_free(turn(job));
        return ring.job[turn(job).at];
    }
    __device__ void end_job(int job) { smem_.ring[job % kRings].jobs.filled(turn(job)); }

    const CombineParams& p_;
    const layout::BufferLayout& buffer_;
    layout::HandleView handle_;
    Smem& smem_;
    uint64_t epoch_;
    int num_jobs_ = 0;
};

// The jobs as a ring's loader takes them.
struct Jobs {
    const CombineParams& p;
    RingSmem& smem;
    Turn turn{};

    __device__ bool next(Sum& sum, const char*& term, float& weight) {
        smem.jobs.await_filled(turn);
        const Job& job = smem.job[turn.at];
        sum = job.sum;
        if (sum.to == nullptr) return false;
        const int lane = lane_id();
        if (lane < sum.num_rows) {
            term = p.io.rows + int64_t(job.row[lane]) * p.io.row_bytes;
            weight = job.weight[lane];
        } else {
            term = job.inbox + int64_t(lane - sum.num_rows) * p.io.row_bytes;
            weight = 1.f;
        }
        __syncwarp();
        if (lane == 0) smem.jobs.freed(turn.at);
        turn.advance(kJobs);
        return true;
    }
};

// One warp. It ends when all is stored, so it knows what the ring did until when.
__device__ void announce(const CombineParams& p, RingSmem& ring, uint64_t epoch) {
    const Trace& trace = p.context.trace;
    const uint64_t begin = ptx::global_timer_ns();
    const uint64_t pushed =
        announce_sums(ring.sums, p.ring.num_slots, flag_value(epoch, signature(p)));
    if (lane_id() != 0) return;
    if (pushed > 0) note(trace, Span::kPushSums, epoch, begin, pushed);
    note(trace, Span::kSumAtHome, epoch, max(begin, pushed), ptx::global_timer_ns());
}

template <typename T, bool kWeighted>
__device__ __forceinline__ void play(int role, const CombineParams& p, char* dynamic_smem,
                                     Smem& smem, uint64_t epoch) {
    if (role == kWalker) {
        const int pushers = min(int(gridDim.x + 1) / 2, kMostPushers);
        const bool pushes = int(blockIdx.x) * pushers % int(gridDim.x) < pushers;
        return Walker(p, smem, epoch).run(pushes);
    }
    const int ring = (role - kFirstOfRings) / kRingWarps;
    const int first = kFirstOfRings + ring * kRingWarps, of_ring = role - first;
    const Slots slots(dynamic_smem, p.ring, ring);
    RingSmem& mine = smem.ring[ring];
    if (of_ring == kLoader) {
        Jobs jobs{p, mine};
        load_terms(jobs, slots, mine.sums, p.slices, p.io.row_bytes);
    } else if (of_ring == kHerald) {
        announce(p, mine, epoch);
    } else {
        const int adder = threadIdx.x - (first + kFirstAdder) * kWarp;
        Adder<T, kWeighted>(slots, mine.sums, adder).run();
    }
}

template <typename T, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    const auto& b = p.context.buffer;
    const Watch& watch = p.context.watch;
    const uint64_t epoch = current_epoch(watch.state, Phase::kCombine);
    const Stopwatch waiting(p.context.trace);
    if (!wait_all_flags(p.context.mine(), b, Phase::kInboxFree, 1, epoch - 1,
                        epoch == 1 ? 0 : kFreeSignature, watch)) {
        return;
    }
    waiting.stop(Span::kAwaitInbox, epoch);
    if (blockIdx.x == 0) {
        signal_all_ranks(p.context.peers, b, Phase::kCombine, p.context.rank, 0, epoch,
                         signature(p));
    }

    if (threadIdx.x < kRings) {
        smem.ring[threadIdx.x].sums.init(p.ring.num_slots);
        smem.ring[threadIdx.x].jobs.init(kJobs, 1);
        smem.failed = false;
    }
    __syncthreads();
    play<T, kWeighted>(warp_id(), p, dynamic_smem, smem, epoch);
    __syncthreads();
    if (smem.failed) return;
    // all ranks make this call, even those that nothing came from
    if (blockIdx.x == 0 &&
        !wait_all_flags(p.context.mine(), b, Phase::kCombine, 1, epoch, signature(p), watch)) {
        return;
    }
    if (is_last_block(watch.state)) {
        if (threadIdx.x == 0) close_call(watch.state, Phase::kCombine, epoch);
        signal_all_ranks(p.context.peers, b, Phase::kInboxFree, p.context.rank, 0, epoch,
                         kFreeSignature);
    }
}

using Kernel = void (*)(CombineParams);

template <bool kWeighted>
Kernel pick(SumType type) {
    return type == SumType::kBf16   ? combine<__nv_bfloat16, kWeighted>
           : type == SumType::kFp16 ? combine<__half, kWeighted>
                                    : combine<float, kWeighted>;
}

}  // namespace

void launch_combine(const CombineParams& p, cudaStream_t stream) {
    launch(p.io.weights != nullptr ? pick<true>(p.io.type) : pick<false>(p.io.type), p,
           p.num_blocks, kThreads, layout::dynamic_smem_bytes(p.ring, kRings), stream);
}

}  // namespace hybrid_ep::kernels
