// The one walk over the copies of a handle, for dispatch (pull) and combine (push) alike.
//
// A step of the walk is a copy from one source, source after source in turn, starting with the rank
// after mine: so at any moment every link carries its share. A warp of its own looks the copies
// up, a lane per copy, and hands them on in batches: so that no warp that moves bytes waits for an
// index.
#pragma once

#include "device/take.cuh"

namespace hybrid_ep::device {

class CopyWalk {
  public:
    // Copies of `num_sources` ranks: all, or one less, then those from my own are left out.
    // `steps_taken` is shared by all that walk, `num_walkers` in this grid, `most` steps at a time.
    __device__ CopyWalk(const layout::HandleView& handle, int num_ranks, int rank, int num_sources,
                        uint32_t* steps_taken, int num_walkers, int most)
        : handle_(handle),
          num_ranks_(num_ranks),
          rank_(rank),
          num_sources_(num_sources),
          takes_(steps_taken, most_copies() * num_sources, num_walkers, kLeastTaken, most) {}

    using Taken = TakenCopy;

    // The whole warp: the next steps, a lane each, not all of which have a copy; false: none is
    // left.
    __device__ bool take(Taken& mine) {
        int first, count;
        if (!takes_.take(first, count)) return false;
        look_up(first + lane_id(), lane_id() < count, mine);
        return true;
    }

  private:
    static constexpr int kLeastTaken = 4;  // with less, the lookups take too long

    __device__ __forceinline__ int num_copies(int source) const {
        return __ldg(&handle_.source_first[source + 1]) - __ldg(&handle_.source_first[source]);
    }
    __device__ __forceinline__ int source_of(int step) const {
        return (step % num_sources_ + rank_ + 1) % num_ranks_;
    }
    // Of any of the sources.
    __device__ int most_copies() const {
        int most = 0;
        for (int i = lane_id(); i < num_sources_; i += kWarp) {
            most = max(most, num_copies(source_of(i)));
        }
        return __reduce_max_sync(kAllLanes, most);
    }

    __device__ __forceinline__ void look_up(int step, bool taken, Taken& mine) const {
        mine.valid = false;
        if (!taken) return;
        mine.source = source_of(step);
        const int at = step / num_sources_;
        if (at >= num_copies(mine.source)) return;
        const int4 words = __ldg(reinterpret_cast<const int4*>(handle_.copies) +
                                 __ldg(&handle_.source_first[mine.source]) + at);
        mine.copy = *reinterpret_cast<const layout::Copy*>(&words);
        mine.rows = handle_.rows + mine.copy.first_row;
        mine.valid = true;
    }

    layout::HandleView handle_;
    int num_ranks_, rank_, num_sources_;
    Takes takes_;
};

}  // namespace hybrid_ep::device
