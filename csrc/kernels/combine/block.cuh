// A block of combine: which warp does what, on one node as on several, where walkers and heralds
// differ (one_node.cu, several_nodes.cuh).
//
//   what is to be summed --look up, await what it needs--> jobs, for two rings            walker
//   job: its terms --TMA loads--> slots                                                   loader
//   slots --add in fp32, in order--> where the sum goes                                   adders
//   sums that are stored --> flags, of those who wait for them                            herald
#pragma once

#include "device/sum_rows.cuh"
#include "device/trace.cuh"
#include "kernels/kernels.h"

namespace hybrid_ep::kernels {

using namespace device;

constexpr int kRings = layout::kSumRings;
constexpr int kSumJobs = 16;  // of a ring: looked up and not loaded yet

// The walker, then ring by ring.
enum CombineRole { kSumsWalker = 0, kFirstOfRings = 1 };
enum RingRole { kTermLoader = 0, kSumsHerald = 1, kFirstAdder = 2 };
constexpr int kRingWarps = kFirstAdder + kAdderWarps;
constexpr int kCombineThreads = (kFirstOfRings + kRings * kRingWarps) * kWarp;

// A sum, and where its terms are: my rows, then sums of others.
struct SumJob {
    Sum sum;
    const char *rows, *sums;
    uint32_t term[layout::kMaxTopk];  // so many times 16 bytes behind `rows` or `sums`
    float weight[layout::kMaxTopk];   // of the rows, where they are weighted
};

struct RingSmem {
    SumSmem sums;
    Handover<kSumJobs> jobs;
    SumJob job[kSumJobs];
};

struct CombineSmem {
    RingSmem ring[kRings];
    bool failed;  // a peer did not come: the call stays open
};
static_assert(sizeof(CombineSmem) <= layout::kStaticSmemBytes);

// The walker's side of the jobs. A lane lists one between begin() and end(), the whole warp then
// says how many have been listed.
class SumJobs {
  public:
    struct Position {
        int ring, n;  // the n-th from now
    };

    static constexpr int kMostListed = kSumJobs / 2;  // for a ring at a time

    __device__ explicit SumJobs(CombineSmem& smem) : smem_(smem) {}

    // For the rings in turn.
    __device__ Position in_turn(int n) const { return {(turn_ + n) % kRings, n / kRings}; }

    __device__ SumJob& begin(const Position& at) {
        const int job = listed(at.ring) + at.n;
        smem_.ring[at.ring].jobs.await_free(Turn::of(job, kSumJobs));
        return smem_.ring[at.ring].job[job % kSumJobs];
    }
    __device__ void end(const Position& at) {
        smem_.ring[at.ring].jobs.filled(Turn::of(listed(at.ring) + at.n, kSumJobs));
    }

    __device__ void advance(int ring, int count) {
#pragma unroll
        for (int i = 0; i < kRings; ++i) listed_[i] += i == ring ? count : 0;
        __syncwarp();
    }
    __device__ void advance_in_turn(int count) {
#pragma unroll
        for (int i = 0; i < kRings; ++i) {
            advance((turn_ + i) % kRings, (count + kRings - 1 - i) / kRings);
        }
        turn_ = (turn_ + count) % kRings;
    }

    // The whole warp: there is no more.
    __device__ void end_all() {
        __syncwarp();  // a job that was listed in vain may be written over
        if (lane_id() >= kRings) return;
        const Position at{lane_id(), 0};
        begin(at).sum.to = nullptr;
        end(at);
    }

  private:
    __device__ int listed(int ring) const {
        int count = 0;
#pragma unroll
        for (int i = 0; i < kRings; ++i) count = i == ring ? listed_[i] : count;
        return count;
    }

    CombineSmem& smem_;
    int listed_[kRings] = {};  // never indexed: it is in registers
    int turn_ = 0;             // the ring that comes next
};

// The jobs as a ring's loader takes them.
struct RingJobs {
    RingSmem& ring;
    Turn turn{};

    __device__ bool next(Sum& sum, const char*& term, float& weight) {
        ring.jobs.await_filled(turn);
        const SumJob& job = ring.job[turn.at];
        sum = job.sum;
        if (sum.to == nullptr) return false;
        const int lane = lane_id();
        const bool is_row = lane < sum.num_rows;
        term = (is_row ? job.rows : job.sums) + int64_t(job.term[lane]) * 16;
        weight = is_row ? job.weight[lane] : 1.f;
        __syncwarp();
        if (lane == 0) ring.jobs.freed(turn.at);
        turn.advance(kSumJobs);
        return true;
    }
};

// All threads of the block, before a barrier; whether the call has failed already.
__device__ inline void init(CombineSmem& smem, const layout::RingShape& shape, bool failed) {
    if (threadIdx.x < kRings) {
        smem.ring[threadIdx.x].sums.init(shape.num_slots);
        smem.ring[threadIdx.x].jobs.init(kSumJobs, 1);
    }
    if (threadIdx.x == 0) smem.failed = failed;
}

// All threads of the block. The walker calls `walk(SumJobs&)`, which lists sums and returns whether
// all went well; a herald `herald(RingSmem&)`.
template <typename T, bool kWeighted, typename Walk, typename Herald>
__device__ __forceinline__ void run_combine(const layout::RingShape& shape,
                                            const layout::SliceLayout& slices, int row_bytes,
                                            char* dynamic_smem, CombineSmem& smem, Walk walk,
                                            Herald herald) {
    const int role = warp_id();
    if (role == kSumsWalker) {
        SumJobs jobs(smem);
        const bool good = walk(jobs);
        if (!good && lane_id() == 0) smem.failed = true;
        return jobs.end_all();
    }
    const int ring = (role - kFirstOfRings) / kRingWarps;
    const int first = kFirstOfRings + ring * kRingWarps, of_ring = role - first;
    const Slots slots(dynamic_smem, shape, ring);
    RingSmem& mine = smem.ring[ring];
    if (of_ring == kTermLoader) {
        RingJobs jobs{mine};
        load_terms(jobs, slots, mine.sums, slices, row_bytes);
    } else if (of_ring == kSumsHerald) {
        herald(mine);
    } else {
        const int adder = threadIdx.x - (first + kFirstAdder) * kWarp;
        Adder<T, kWeighted>(slots, mine.sums, adder).run();
    }
}

}  // namespace hybrid_ep::kernels
