// The walk over the copies of a handle where tokens travel by chunks: chunk after chunk, of each
// the copies from all sources in turn, starting with the rank after mine.
//
// Invariant "chunks in order": all ranks walk in this order. So of the chunks that are not done
// everywhere the first never waits for another, and windows that hold a few chunks are enough
// (docs/several_nodes.md).
// A warp of its own looks the copies up, a lane per copy.
#pragma once

#include "device/take.cuh"

namespace hybrid_ep::device {

class ChunkWalk {
  public:
    // `chunks_taken` is shared by all that walk, `num_walkers` in this grid; `most` copies at a
    // time.
    __device__ ChunkWalk(const layout::HandleView& handle, int num_ranks, int rank,
                         int chunk_tokens, int num_chunks, uint32_t* chunks_taken, int num_walkers,
                         int most)
        : handle_(handle),
          num_ranks_(num_ranks),
          rank_(rank),
          chunk_tokens_(chunk_tokens),
          max_tokens_(num_chunks * chunk_tokens),
          most_(min(most, kWarp)),
          takes_(chunks_taken, num_ranks * num_chunks, num_walkers, 1,
                 chunks_of(handle, num_ranks * num_chunks, most_)) {}

    using Taken = TakenCopy;

    // The whole warp: the next copies, in order of lanes; false: none is left.
    __device__ bool take(Taken& mine) {
        while (at_ == end_) {
            if (!take_chunks()) return false;
        }
        const int item = at_ + lane_id();
        mine.valid = lane_id() < most_ && item < end_;
        at_ = min(at_ + most_, end_);
        int chunk = 0;  // the last one that does not begin behind the item
        for (int step = kWarp / 2; step > 0; step /= 2) {
            const int begin = __shfl_sync(kAllLanes, before_, chunk + step);
            if (begin <= item) chunk += step;
        }
        mine.source = __shfl_sync(kAllLanes, source_, chunk);
        const int first = __shfl_sync(kAllLanes, first_, chunk),
                  before = __shfl_sync(kAllLanes, before_, chunk);
        if (!mine.valid) return true;
        const int4 words =
            __ldg(reinterpret_cast<const int4*>(handle_.copies) + first + item - before);
        mine.copy = *reinterpret_cast<const layout::Copy*>(&words);
        mine.rows = handle_.rows + mine.copy.first_row;
        return true;
    }

  private:
    // As many as have that many copies on average.
    static __device__ int chunks_of(const layout::HandleView& handle, int num_chunks, int copies) {
        const int num_copies = handle.header[layout::HandleLayout::kNumCopies];
        return max(1, min(kWarp, copies / layout::ceil_div(max(num_copies, 1), num_chunks)));
    }

    // The whole warp: looks up chunks, a lane each.
    __device__ bool take_chunks() {
        int first, count;
        if (!takes_.take(first, count)) return false;
        int num_copies = 0;
        if (lane_id() < count) {
            const int unit = first + lane_id();
            source_ = (rank_ + 1 + unit % num_ranks_) % num_ranks_;
            const int token = unit / num_ranks_ * chunk_tokens_;
            first_ = first_copy(source_, token);
            num_copies = first_copy(source_, token + chunk_tokens_) - first_;
        }
        const int upto = warp_inclusive_sum(num_copies);
        before_ = upto - num_copies;
        at_ = 0;
        end_ = __shfl_sync(kAllLanes, upto, kWarp - 1);
        return true;
    }

    // Of the copies from a source, which are ordered by token, the first that is not before it.
    __device__ int first_copy(int source, int token) const {
        const int begin = __ldg(&handle_.source_first[source]),
                  count = __ldg(&handle_.source_first[source + 1]) - begin;
        // a token has one copy at most, so this many are before it
        int low = max(0, count - max(max_tokens_ - token, 0)), high = min(count, token);
        while (low < high) {
            const int middle = (low + high) / 2;
            if (__ldg(&handle_.copies[begin + middle].token) < token) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return begin + low;
    }

    layout::HandleView handle_;
    int num_ranks_, rank_, chunk_tokens_, max_tokens_, most_;
    Takes takes_;
    int source_ = 0, first_ = 0, before_ = 0;  // of the lane's chunk: copies of those before it
    int at_ = 0, end_ = 0;                     // of the copies of all of them
};

}  // namespace hybrid_ep::device
