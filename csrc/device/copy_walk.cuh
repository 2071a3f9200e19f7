// The one walk over the copies of a handle, for dispatch (pull) and combine (push) alike.
//
// A step of the walk is a copy from one source, source after source in turn, starting with the rank
// after mine: so at any moment every link carries its share. Whoever is ready takes the next steps,
// fewer towards the end: blocks are not equally fast, because the link does not serve all SMs
// alike. A warp of its own looks the copies up, a lane per copy, and hands them on in batches: so
// that nobody who moves bytes ever waits for an index.
#pragma once

#include "device/ring.cuh"
#include "layout/handle_layout.h"

namespace hybrid_ep::device {

// Copies with their rows, in shared memory.
struct CopyBatch {
    static constexpr int kRows = 192;  // at least the most that one copy has

    int num_copies;  // 0: the walk is over
    int num_rows;
    float progress;  // of the whole walk, 0 to 1
    layout::Copy copy[kWarp];
    int source[kWarp];     // rank that the copy came from
    int first_row[kWarp];  // its rows begin here in row[]
    int row[kRows];
    float weight[kRows];
};
static_assert(CopyBatch::kRows >= layout::kMaxTopk);

// Two batches: one is used while the next is looked up.
struct CopyBatches {
    static constexpr int kSize = 2;
    Handover<kSize> handover;
    CopyBatch batch[kSize];
};

class CopyWalk {
  public:
    // `steps_taken` is shared by all that walk, `num_walkers` in this grid.
    __device__ CopyWalk(const layout::HandleView& handle, int num_ranks, int rank,
                        uint32_t* steps_taken, int num_walkers)
        : handle_(handle),
          num_ranks_(num_ranks),
          rank_(rank),
          steps_taken_(steps_taken),
          num_walkers_(num_walkers) {
        int most = 0;
        for (int s = lane_id(); s < num_ranks; s += kWarp) {
            most = max(most, handle.source_first[s + 1] - handle.source_first[s]);
        }
        num_steps_ = __reduce_max_sync(kAllLanes, most) * num_ranks;
    }

    // The whole warp: the next copies, as many as fit; the walk is over if there are none.
    __device__ void next(CopyBatch& batch) {
        uint32_t have = 0;
        layout::Copy copy{};
        int source = 0, rows = 0, rows_upto = 0;
        while (have == 0) {
            if (step_ == end_) take();
            if (step_ >= num_steps_) break;
            const bool valid = look_up(copy, source);
            rows = valid ? copy.num_rows : 0;
            rows_upto = warp_inclusive_sum(rows);
            // the lanes that fit are the first ones
            const uint32_t fits =
                __ballot_sync(kAllLanes, step_ + lane_id() < end_ && rows_upto <= CopyBatch::kRows);
            have = __ballot_sync(kAllLanes, valid) & fits;
            step_ += __popc(fits);
        }
        const bool mine = (have >> lane_id()) & 1;
        if (mine) {
            const int at = __popc(have & lanes_below());
            batch.copy[at] = copy;
            batch.source[at] = source;
            batch.first_row[at] = rows_upto - rows;
#pragma unroll 4
            for (int i = 0; i < rows; ++i) {
                batch.row[rows_upto - rows + i] = __ldg(&handle_.rows[copy.first_row + i]);
            }
        }
        const int num_rows = __reduce_max_sync(kAllLanes, mine ? rows_upto : 0);
        if (lane_id() == 0) {
            batch.num_copies = __popc(have);
            batch.num_rows = num_rows;
            batch.progress = float(step_) / float(max(num_steps_, 1));
        }
        __syncwarp();
    }

  private:
    static constexpr int kLeastTaken = 4;

    // An eighth of this walker's share of what is left.
    __device__ void take() {
        const int share = (num_steps_ - step_) / (8 * num_walkers_);
        const int count = min(max(share, kLeastTaken), kWarp);
        int first = 0;
        if (lane_id() == 0) first = int(atomicAdd(steps_taken_, uint32_t(count)));
        step_ = __shfl_sync(kAllLanes, first, 0);
        end_ = min(step_ + count, max(num_steps_, step_));
    }

    // The copy of this lane's step of the walk; false: none.
    __device__ __forceinline__ bool look_up(layout::Copy& copy, int& source) const {
        const int step = step_ + lane_id();
        if (step >= end_) return false;
        source = (step + rank_ + 1) % num_ranks_;
        const int first = __ldg(&handle_.source_first[source]);
        const int count = __ldg(&handle_.source_first[source + 1]) - first;
        const int at = step / num_ranks_;
        if (at >= count) return false;
        const int4 words = __ldg(reinterpret_cast<const int4*>(handle_.copies) + first + at);
        copy = *reinterpret_cast<const layout::Copy*>(&words);
        return true;
    }

    layout::HandleView handle_;
    int num_ranks_, rank_;
    uint32_t* steps_taken_;
    int num_walkers_;
    int num_steps_, step_ = 0, end_ = 0;  // mine are [step_, end_)
};

}  // namespace hybrid_ep::device
