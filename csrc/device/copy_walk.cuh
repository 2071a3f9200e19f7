// The one walk over the copies of a handle, for dispatch (pull) and combine (push) alike.
//
// Copies are dealt to the takers of the grid one by one, source after source in turn, starting with
// the rank after mine: so at any moment every link carries its share, and no source's remainder
// always falls to the same takers. A warp of its own looks them up, a lane per copy, and hands them
// on in batches: so that nobody who moves bytes ever waits for an index.
#pragma once

#include "device/ring.cuh"
#include "layout/handle_layout.h"

namespace hybrid_ep::device {

// Copies with their rows, in shared memory.
struct CopyBatch {
    static constexpr int kRows = 192;  // at least the most that one copy has

    int num_copies;  // 0: the walk is over
    int num_rows;
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
    __device__ CopyWalk(const layout::HandleView& handle, int num_ranks, int rank, int taker,
                        int num_takers)
        : handle_(handle),
          num_ranks_(num_ranks),
          rank_(rank),
          taker_(taker),
          num_takers_(num_takers) {
        int most = 0;
        for (int s = lane_id(); s < num_ranks; s += kWarp) {
            most = max(most, handle.source_first[s + 1] - handle.source_first[s]);
        }
        most = __reduce_max_sync(kAllLanes, most);
        num_steps_ = layout::ceil_div(most, num_takers) * num_ranks;
    }

    // The whole warp: the next copies, as many as fit; the walk is over if there are none.
    __device__ void next(CopyBatch& batch) {
        uint32_t have = 0;
        layout::Copy copy{};
        int source = 0, rows = 0, rows_upto = 0;
        while (have == 0 && step_ < num_steps_) {
            const bool valid = look_up(copy, source);
            rows = valid ? copy.num_rows : 0;
            rows_upto = warp_inclusive_sum(rows);
            const uint32_t fits = __ballot_sync(kAllLanes, rows_upto <= CopyBatch::kRows);
            have = __ballot_sync(kAllLanes, valid) & fits;
            step_ += __popc(fits);  // the lanes that fit are the first ones
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
        }
        __syncwarp();
    }

  private:
    // The copy of this lane's step of the walk; false: none.
    __device__ __forceinline__ bool look_up(layout::Copy& copy, int& source) const {
        const int step = step_ + lane_id(), round = step / num_ranks_;
        if (step >= num_steps_) return false;
        source = (step + rank_ + 1) % num_ranks_;
        const int first = __ldg(&handle_.source_first[source]);
        const int count = __ldg(&handle_.source_first[source + 1]) - first;
        const int turn = (taker_ + source * (num_takers_ / num_ranks_ + 1)) % num_takers_;
        const int at = round * num_takers_ + turn;
        if (at >= count) return false;
        const int4 words = __ldg(reinterpret_cast<const int4*>(handle_.copies) + first + at);
        copy = *reinterpret_cast<const layout::Copy*>(&words);
        return true;
    }

    layout::HandleView handle_;
    int num_ranks_, rank_, taker_, num_takers_;
    int num_steps_, step_ = 0;
};

}  // namespace hybrid_ep::device
