// The one walk over the copies of a handle, for dispatch (pull) and combine (push) alike.
//
// Copies are dealt to the warps of the grid one by one, source after source in turn, starting with
// the rank after mine: so at any moment every link carries its share, and no source's remainder
// always falls to the same warps. A batch of 32 copies is fetched at once, a lane per copy.
#pragma once

#include "device/warp.cuh"
#include "layout/handle_layout.h"

namespace hybrid_ep::device {

class CopyWalk {
  public:
    __device__ CopyWalk(const layout::HandleView& handle, int num_ranks, int rank, int warp,
                        int num_warps)
        : handle_(handle), num_ranks_(num_ranks), rank_(rank), warp_(warp), num_warps_(num_warps) {
        int most = 0;
        for (int s = lane_id(); s < num_ranks; s += kWarp) {
            most = max(most, handle.source_first[s + 1] - handle.source_first[s]);
        }
        most = __reduce_max_sync(0xFFFFFFFFu, most);
        rounds_ = layout::ceil_div(most, num_warps);
    }

    // The whole warp: the next copy, its source rank, and in lane i its i-th row (i < num_rows).
    __device__ __forceinline__ bool next(layout::Copy& copy, int& source, int& row) {
        while (pending_ == 0) {
            if (batch_ * kWarp >= rounds_ * num_ranks_) return false;
            fetch_batch();
        }
        int from = __ffs(pending_) - 1;
        pending_ &= pending_ - 1;
        copy = broadcast(from);
        source = __shfl_sync(0xFFFFFFFFu, lane_source_, from);
        row = lane_id() < copy.num_rows ? handle_.rows[copy.first_row + lane_id()] : 0;
        return true;
    }

  private:
    __device__ __forceinline__ void fetch_batch() {
        int step = batch_++ * kWarp + lane_id();
        int round = step / num_ranks_;
        lane_source_ = (step + rank_ + 1) % num_ranks_;
        int first = round < rounds_ ? handle_.source_first[lane_source_] : 0;
        int count = round < rounds_ ? handle_.source_first[lane_source_ + 1] - first : 0;
        int turn = (warp_ + lane_source_ * (num_warps_ / num_ranks_ + 1)) % num_warps_;
        int at = round * num_warps_ + turn;
        bool valid = at < count;
        lane_copy_ = valid ? reinterpret_cast<const int4*>(handle_.copies)[first + at] : int4{};
        pending_ = __ballot_sync(0xFFFFFFFFu, valid);
    }

    __device__ __forceinline__ layout::Copy broadcast(int from) const {
        int4 words;
        words.x = __shfl_sync(0xFFFFFFFFu, lane_copy_.x, from);
        words.y = __shfl_sync(0xFFFFFFFFu, lane_copy_.y, from);
        words.z = __shfl_sync(0xFFFFFFFFu, lane_copy_.z, from);
        words.w = __shfl_sync(0xFFFFFFFFu, lane_copy_.w, from);
        layout::Copy copy;
        copy.token = words.x;
        copy.first_row = words.y;
        copy.num_places = int16_t(words.z & 0xFFFF);
        copy.num_rows = int16_t(words.z >> 16);
        copy.first_place = uint8_t(words.w & 0xFF);
        copy.inbox_slot = uint8_t((words.w >> 8) & 0xFF);
        copy.unused = 0;
        return copy;
    }

    layout::HandleView handle_;
    int num_ranks_, rank_, warp_, num_warps_;
    int rounds_, batch_ = 0;
    uint32_t pending_ = 0;
    int lane_source_ = 0;
    int4 lane_copy_{};
};

}  // namespace hybrid_ep::device
