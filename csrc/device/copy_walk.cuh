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

    // What a lane has taken.
    struct Taken {
        bool valid;  // not every step has a copy
        int source;  // rank that the copy came from
        layout::Copy copy;
        const int32_t* rows;  // [copy.num_rows]
    };

    // The whole warp: the next steps, at most `most` of them, a lane each; false: none is left.
    __device__ bool take(int most, Taken& mine) {
        const int share = (num_steps_ - step_) / (kTakesOfShare * num_walkers_);
        const int count = min(max(share, kLeastTaken), min(most, kWarp));
        int first = 0;
        if (lane_id() == 0) first = int(atomicAdd(steps_taken_, uint32_t(count)));
        step_ = __shfl_sync(kAllLanes, first, 0);
        if (step_ >= num_steps_) return false;
        look_up(step_ + lane_id(), lane_id() < count, mine);
        step_ += count;
        return true;
    }

  private:
    static constexpr int kTakesOfShare = 8;  // a share is what is left for each
    static constexpr int kLeastTaken = 4;

    __device__ __forceinline__ void look_up(int step, bool taken, Taken& mine) const {
        mine.valid = false;
        if (!taken || step >= num_steps_) return;
        mine.source = (step + rank_ + 1) % num_ranks_;
        const int first = __ldg(&handle_.source_first[mine.source]);
        const int count = __ldg(&handle_.source_first[mine.source + 1]) - first;
        const int at = step / num_ranks_;
        if (at >= count) return;
        const int4 words = __ldg(reinterpret_cast<const int4*>(handle_.copies) + first + at);
        mine.copy = *reinterpret_cast<const layout::Copy*>(&words);
        mine.rows = handle_.rows + mine.copy.first_row;
        mine.valid = true;
    }

    layout::HandleView handle_;
    int num_ranks_, rank_;
    uint32_t* steps_taken_;
    int num_walkers_;
    int num_steps_, step_ = 0;
};

}  // namespace hybrid_ep::device
