// A pipeline inside a block: one warp loads into the slots of a ring, others use what has landed.
//
//   loader   await_free(turn), loads, header, filled(turn) --> slot --> await_filled(turn)   user
//            ^------------------------------------------------ freed(turn) <-------------------'
//
// Each warp that takes a turn at every slot keeps its own Turn. The loader never learns what the
// users do with a slot and the users never where it came from: both read it in the slot's header.
#pragma once

#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "layout/ring_shape.h"

namespace hybrid_ep::device {

// Which entry comes next, and how often all have been used: its parity.
struct Turn {
    int at = 0;
    uint32_t parity = 0;

    // Of the n-th entry that is used, where a lane takes another n than its neighbours.
    static __device__ __forceinline__ Turn of(int n, int size) {
        return {n % size, uint32_t(n / size) & 1};
    }
    __device__ __forceinline__ void advance(int size) {
        if (++at == size) {
            at = 0;
            parity ^= 1;
        }
    }
};

// A handing over of entries between one warp and others, to and fro. Lives in shared memory.
template <int kMostEntries>
struct Handover {
    uint64_t filled_[kMostEntries], free_[kMostEntries];

    // One thread, before a barrier of the block: how often freed() is called per entry, and
    // filled().
    __device__ void init(int size, int users, int fillers = 1) {
        for (int i = 0; i < size; ++i) {
            ptx::mbarrier_init(&filled_[i], fillers);
            ptx::mbarrier_init(&free_[i], users);
        }
        ptx::fence_mbarrier_init();
    }

    // ---- the warp that fills; `filled` by one lane, after a __syncwarp

    __device__ __forceinline__ void await_free(const Turn& turn) {
        ptx::mbarrier_wait(&free_[turn.at], turn.parity ^ 1);
    }
    __device__ __forceinline__ void filled(const Turn& turn) {
        ptx::mbarrier_arrive(&filled_[turn.at]);
    }
    // Filled once bulk loads, with barrier(turn), have brought so many bytes.
    __device__ __forceinline__ void filled_by(const Turn& turn, uint32_t bytes) {
        ptx::mbarrier_expect(&filled_[turn.at], bytes);
    }
    __device__ __forceinline__ uint64_t* barrier(const Turn& turn) { return &filled_[turn.at]; }

    // ---- the users

    __device__ __forceinline__ void await_filled(const Turn& turn) {
        ptx::mbarrier_wait(&filled_[turn.at], turn.parity);
    }
    // The whole warp: so many of `size` entries in a row are filled, from the n-th that is used on.
    __device__ __forceinline__ int num_filled(int n, int size) {
        static_assert(kMostEntries < kWarp);
        const Turn turn = Turn::of(n + lane_id(), size);
        const bool filled = lane_id() < size && is_filled(turn);
        return __ffs(~__ballot_sync(kAllLanes, filled)) - 1;
    }
    __device__ __forceinline__ bool is_filled(const Turn& turn) {
        return ptx::mbarrier_test(&filled_[turn.at], turn.parity);
    }
    __device__ __forceinline__ void freed(int entry) { ptx::mbarrier_arrive(&free_[entry]); }
};

using SlotHandover = Handover<layout::kMostSlots>;

// The slots of a ring in dynamic shared memory, each with a header.
class Slots {
  public:
    // `smem` is the block's dynamic shared memory, which several rings of the same shape may share.
    __device__ Slots(char* smem, const layout::RingShape& shape, int ring = 0) : shape_(shape) {
        const int start = -ptx::smem_address(smem) & (layout::kSlotAlign - 1);
        base_ = smem + start + ring * layout::round_up(shape.bytes(), layout::kSlotAlign);
    }

    __device__ __forceinline__ int size() const { return shape_.num_slots; }
    __device__ __forceinline__ char* bytes(int slot) const {
        return base_ + slot * shape_.slot_bytes;
    }
    __device__ __forceinline__ char* end() const { return base_ + shape_.bytes(); }
    template <typename Header>
    __device__ __forceinline__ Header& header(int slot) const {
        return *reinterpret_cast<Header*>(base_ + shape_.slots_bytes() +
                                          slot * shape_.header_bytes);
    }

  private:
    layout::RingShape shape_;
    char* base_;
};

}  // namespace hybrid_ep::device
