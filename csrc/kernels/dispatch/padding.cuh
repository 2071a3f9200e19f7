// Rows of the experts that no copy fills: they are zeroed, whatever was there before.
#pragma once

#include "device/warp.cuh"
#include "kernels/kernels.h"

namespace hybrid_ep::kernels {

using namespace device;

// The whole warp.
__device__ inline void zero_row(const Received& received, const layout::RecordLayout& record,
                                int64_t row) {
    auto* to = reinterpret_cast<uint4*>(received.rows + row * record.row_bytes);
    for (int i = lane_id(); i < record.row_bytes / 16; i += kWarp) to[i] = uint4{};
    char* scales = received.scales + row * record.scale_bytes;
    for (int i = lane_id(); i < record.scale_bytes; i += kWarp) scales[i] = 0;
    if (lane_id() == 0 && record.weight_bytes > 0) received.weights[row] = 0.f;
}

// The end of each expert's group, and the tail after the last: of their rows one in `step`, from
// `first` on. The whole warp; a lane looks up an expert.
__device__ inline void zero_padding(const Received& received, const layout::RecordLayout& record,
                                    const layout::HandleView& handle, int num_local_experts,
                                    int first, int step) {
    const int experts = num_local_experts;
    for (int base = 0; base <= experts; base += kWarp) {
        const int e = base + lane_id();
        int begin = 0, end = 0;
        if (e <= experts) begin = handle.offsets[e] + (e < experts ? handle.counts[e] : 0);
        if (e <= experts) end = e < experts ? handle.offsets[e + 1] : int(received.num_rows);
        for (uint32_t left = __ballot_sync(kAllLanes, begin < end); left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            const int last = __shfl_sync(kAllLanes, end, lane);
            const int64_t from = __shfl_sync(kAllLanes, begin, lane);
            for (int64_t row = from + first; row < last; row += step) {
                zero_row(received, record, row);
            }
        }
    }
}

}  // namespace hybrid_ep::kernels
