// Work is taken, not dealt: blocks are not equally fast, because the link does not serve all SMs
// alike. The warp that is ready takes the next items, fewer towards the end.
#pragma once

#include "device/warp.cuh"
#include "layout/handle_layout.h"

namespace hybrid_ep::device {

// A taker asks for its next items when it gets some, since the answer takes a microsecond.
class Takes {
  public:
    // `taken` is shared by all takers of this grid, `num_takers` warps; `least` to `most` items at
    // a time.
    __device__ Takes(uint32_t* taken, int num_items, int num_takers, int least, int most)
        : taken_(taken),
          num_items_(num_items),
          num_takers_(num_takers),
          least_(min(least, most)),
          most_(min(most, kWarp)) {
        ask(0);
    }

    // The whole warp: the next `count` items; false: none is left.
    __device__ bool take(int& first, int& count) {
        first = __shfl_sync(kAllLanes, first_, 0);
        count = min(count_, num_items_ - first);
        if (count <= 0) return false;
        ask(first + count);
        return true;
    }

  private:
    static constexpr int kTakesOfShare = 8;  // a share is what is left for each

    // At least `num_taken` are gone.
    __device__ __forceinline__ void ask(int num_taken) {
        const int share = (num_items_ - num_taken) / (kTakesOfShare * num_takers_);
        count_ = min(max(share, least_), most_);
        if (lane_id() == 0) first_ = int(atomicAdd(taken_, uint32_t(count_)));
    }

    uint32_t* taken_;
    int num_items_, num_takers_, least_, most_;
    int first_ = 0, count_;  // of the answer, in lane 0
};

// A copy, as a lane of a walk has taken it.
struct TakenCopy {
    bool valid;  // else there is none for the lane
    int source;  // rank that the copy came from
    layout::Copy copy;
    const int32_t* rows;  // [copy.num_rows]
};

}  // namespace hybrid_ep::device
