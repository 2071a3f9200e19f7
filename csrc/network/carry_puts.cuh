// What a card does with the puts that kernels have posted: each waits as long as a network might
// take, then its bytes go, and its signal behind them.
#pragma once

#include "device/ptx.cuh"
#include "device/warp_copy.cuh"
#include "network/put_queue.h"

namespace hybrid_ep::network {

using namespace device;

// Even bits of a number, as if by chance.
__device__ inline uint64_t mixed(uint64_t n) {
    n = (n ^ n >> 30) * 0xBF58476D1CE4E5B9ull;
    n = (n ^ n >> 27) * 0x94D049BB133111EBull;
    return n ^ n >> 31;
}

// One thread: the count, with this one.
__device__ inline uint64_t count(uint64_t* counter) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull) + 1;
}

// One lane: until the put has been posted; false: no kernel will post it.
__device__ inline bool await_posted(const PutQueue& q, uint64_t number, uint64_t launch) {
    const uint64_t* posted = &q.puts[number % PutQueue::kCapacity].number;
    while (ptx::load_acquire(posted) != number) {
        if (ptx::load_acquire(q.over) >= launch && ptx::load_acquire(q.posted) < number) {
            return false;
        }
        __nanosleep(500);
    }
    return true;
}

__device__ inline void wait_as_a_network(const PutQueue& q, uint64_t number) {
    const uint64_t chance = mixed(number + ptx::global_timer_ns());
    const uint32_t most = q.most_ns * (chance % 64 == 0 ? 16 : 1);
    const uint64_t due = ptx::global_timer_ns() + uint32_t(chance >> 32) % (most + 1);
    while (ptx::global_timer_ns() < due) __nanosleep(500);
}

// One thread: until the launch of the card before this one has ended; it runs already.
__device__ inline void await_turn(const PutQueue& q, uint64_t launch) {
    while (ptx::load_acquire(q.ended) < launch - 1) __nanosleep(500);
}

// A warp, in the n-th launch of the card, from 1: all puts of a carrier, until the kernels of as
// many launches are over.
__device__ inline void carry_puts(const PutQueue& q, int carrier, uint64_t launch) {
    for (uint64_t number = q.next[carrier];; number += PutQueue::kCarriers) {
        bool is_there = true;
        if (lane_id() == 0) is_there = await_posted(q, number, launch);
        if (!__all_sync(kAllLanes, is_there)) return;
        if (lane_id() == 0) wait_as_a_network(q, number);
        __syncwarp();
        const PostedPut put = q.puts[number % PutQueue::kCapacity];
        copy_warp(put.to, put.from, put.bytes);
        if (lane_id() != 0) continue;
        if (put.adds) {
            ptx::add_release(put.flag, put.value);
        } else {
            ptx::store_release(put.flag, put.value);
        }
        ptx::store_release(&q.next[carrier], number + PutQueue::kCarriers);
    }
}

}  // namespace hybrid_ep::network
