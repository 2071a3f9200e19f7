// Copies between global memories by a single warp.
#pragma once

#include <cstddef>

#include "device/ptx.cuh"
#include "device/warp.cuh"

namespace hybrid_ep::device {

// By ordinary accesses. The whole warp; a multiple of 16 bytes, aligned so.
__device__ inline void copy_warp(void* to, const void* from, size_t bytes) {
    auto* target = static_cast<uint4*>(to);
    auto* source = static_cast<const uint4*>(from);
    for (size_t at = lane_id(); at < bytes / 16; at += kWarp) target[at] = source[at];
    __syncwarp();
}

// By bulk copies, through a ring of stages in shared memory that no other warp touches: several
// pieces are under way at once, where a lane's loads would wait for memory.
class BulkCopier {
  public:
    static constexpr int kStages = 4, kStageBytes = 4096;
    static constexpr int kSmemBytes = 128 + kStages * kStageBytes;  // of a warp

    // The whole warp; `smem` is aligned to 128 bytes.
    __device__ explicit BulkCopier(char* smem)
        : landed_(reinterpret_cast<uint64_t*>(smem)), stages_(smem + 128) {
        if (lane_id() == 0) {
            for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&landed_[i], 1);
            ptx::fence_mbarrier_init();
        }
        __syncwarp();
    }

    // One lane, always the same; a multiple of 16 bytes, aligned so. What is read must be visible
    // to bulk copies; bulk_wait_written() tells when all is written.
    __device__ void copy(char* to, const char* from, int64_t bytes) {
        const int pieces = int((bytes + kStageBytes - 1) / kStageBytes);
        auto size = [&](int i) {
            return int(min(bytes - int64_t(i) * kStageBytes, int64_t(kStageBytes)));
        };
        int loaded = 0;
        for (int stored = 0; stored < pieces; ++stored, ++count_) {
            // one stage less than there are: the newest store may still be reading the last
            for (; loaded < pieces && loaded - stored < kStages - 1; ++loaded) {
                const int stage = (count_ + loaded - stored) % kStages;
                ptx::bulk_wait_read<1>();
                ptx::mbarrier_expect(&landed_[stage], size(loaded));
                ptx::bulk_load(stages_ + stage * kStageBytes, from + int64_t(loaded) * kStageBytes,
                               size(loaded), &landed_[stage]);
            }
            const int stage = count_ % kStages;
            ptx::mbarrier_wait(&landed_[stage], count_ / kStages & 1);
            ptx::bulk_store(to + int64_t(stored) * kStageBytes, stages_ + stage * kStageBytes,
                            size(stored));
            ptx::bulk_commit();
        }
    }

  private:
    uint64_t* landed_;
    char* stages_;
    uint32_t count_ = 0;  // pieces that have passed
};

}  // namespace hybrid_ep::device
