// The copies of one source rank's chunk of tokens: at most 32, a lane for each.
#pragma once

#include "device/warp.cuh"
#include "layout/handle_layout.h"

namespace hybrid_ep::device {

class ChunkCopies {
  public:
    // The whole warp.
    __device__ ChunkCopies(const layout::HandleView& handle, int source, int first_token,
                           int num_tokens)
        : handle_(handle) {
        const int end = handle.source_first[source + 1];
        const int at = first_copy(handle.source_first[source], end, first_token) + lane_id();
        if (at < end) words_ = reinterpret_cast<const int4*>(handle.copies)[at];
        pending_ = __ballot_sync(0xFFFFFFFFu, at < end && words_.x < first_token + num_tokens);
    }

    // The whole warp: the next copy, and in lane i its i-th row (i < num_rows).
    __device__ __forceinline__ bool next(layout::Copy& copy, int& row) {
        if (pending_ == 0) return false;
        const int from = __ffs(pending_) - 1;
        pending_ &= pending_ - 1;
        const int z = __shfl_sync(0xFFFFFFFFu, words_.z, from),
                  w = __shfl_sync(0xFFFFFFFFu, words_.w, from);
        copy.token = __shfl_sync(0xFFFFFFFFu, words_.x, from);
        copy.first_row = __shfl_sync(0xFFFFFFFFu, words_.y, from);
        copy.num_places = int16_t(z & 0xFFFF);
        copy.num_rows = int16_t(z >> 16);
        copy.first_place = uint8_t(w & 0xFF);
        row = lane_id() < copy.num_rows ? handle_.rows[copy.first_row + lane_id()] : 0;
        return true;
    }

  private:
    // The first of the copies [begin, end), which are ordered by token, that is not before `token`:
    // each step looks at 32 of them.
    __device__ __forceinline__ int first_copy(int begin, int end, int token) const {
        while (begin < end) {
            const int step = (end - begin + kWarp - 1) / kWarp;
            const int at = begin + (lane_id() + 1) * step - 1;  // the last of the lane's part
            const bool before = at < end && handle_.copies[at].token < token;
            const int parts = __popc(__ballot_sync(0xFFFFFFFFu, before));
            begin += parts * step;
            if (step == 1) return min(begin, end);
            end = min(end, begin + step);
        }
        return end;
    }

    layout::HandleView handle_;
    int4 words_{};
    uint32_t pending_ = 0;
};

}  // namespace hybrid_ep::device
