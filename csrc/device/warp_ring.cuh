// A warp's own pipeline: bulk loads into a ring of shared-memory stages, work, bulk stores out.
//
//        load(stage i+2)    load(stage i+1)     work on stage i      stores of stage i-1 still read
//
// Each warp runs one by itself: no other warp touches its stages, so nothing but the copy engine
// is ever waited for, and a block has as many independent pipelines as it has warps.
#pragma once

#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "layout/warp_ring_shape.h"

namespace hybrid_ep::device {

constexpr int kStoresInFlight = 1;  // newest stages whose stores may still be reading them

using layout::WarpRingShape;

class WarpRing {
  public:
    // All threads of the block: carves the warp's part out of the block's dynamic shared memory.
    __device__ WarpRing(char* smem, const WarpRingShape& shape) : shape_(shape) {
        smem += (128 - ptx::smem_address(smem) % 128) % 128;
        int stages = shape.num_warps * shape.num_stages;
        full_ = reinterpret_cast<uint64_t*>(smem + int64_t(stages) * shape.stage_stride()) +
                warp_id() * shape.num_stages;
        stages_ = smem + int64_t(warp_id()) * shape.num_stages * shape.stage_stride();
        if (lane_id() == 0) {
            for (int i = 0; i < shape.num_stages; ++i) ptx::mbarrier_init(&full_[i], 1);
            ptx::fence_mbarrier_init();
        }
        __syncwarp();
    }

    // The warp's loop. `role.load(ring)` starts the loads of the next stage, or returns false when
    // there is no more; `role.work(stage)` uses a stage that has landed and may start bulk stores
    // from it, each lane its own, which this loop commits.
    template <typename Role>
    __device__ __forceinline__ void run(Role& role) {
        const int lag = shape_.num_stages > 1 ? kStoresInFlight : 0;
        bool more = true;
        while (true) {
            while (more && loaded_ - worked_ < shape_.num_stages - lag) {
                if (lag == 0) {
                    ptx::bulk_wait_read<0>();
                } else {
                    ptx::bulk_wait_read<kStoresInFlight>();
                }
                __syncwarp();
                more = role.load(*this);
            }
            if (worked_ == loaded_) break;
            ptx::mbarrier_wait(&full_[work_at_], work_parity_);
            role.work(stage(work_at_));
            ptx::bulk_commit();
            ++worked_;
            if (++work_at_ == shape_.num_stages) {
                work_at_ = 0;
                work_parity_ ^= 1;
            }
        }
        ptx::bulk_wait_written<0>();
    }

    // ---- for Role::load

    __device__ __forceinline__ char* load_stage() const { return stage(load_at_); }
    __device__ __forceinline__ uint64_t* load_barrier() const { return &full_[load_at_]; }

    // One lane says how many bytes the stage will get (0 is legal), before or after the loads.
    __device__ __forceinline__ void expect(uint32_t bytes) {
        if (lane_id() == 0) ptx::mbarrier_expect(load_barrier(), bytes);
    }
    // The whole warp, after its loads.
    __device__ __forceinline__ void advance_load() {
        __syncwarp();
        ++loaded_;
        if (++load_at_ == shape_.num_stages) load_at_ = 0;
    }

    __device__ __forceinline__ int header_offset() const { return shape_.stage_bytes; }

  private:
    __device__ __forceinline__ char* stage(int i) const {
        return stages_ + i * shape_.stage_stride();
    }

    WarpRingShape shape_;
    char* stages_;
    uint64_t* full_;
    uint32_t loaded_ = 0, worked_ = 0;
    int load_at_ = 0, work_at_ = 0;
    uint32_t work_parity_ = 0;
};

}  // namespace hybrid_ep::device
