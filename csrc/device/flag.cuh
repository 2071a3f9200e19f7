// Flags between ranks: signalling, and the one way of waiting.
//
// A flag holds (call number << 16) | signature of the call. Invariant "flags grow": it is never
// reset, and a rank that is a call ahead still satisfies waits for the call before. The signature
// tells apart peers that agree on the number but not on what they are doing.
//
// Beside the flags each rank announces every verb that it begins (layout/announcement.h). No verb
// ends before its rank has seen equal announcements of its peers, so verbs that do not belong
// together are a fault; a wait in vain looks at them too, and ends at once where the peer makes
// another verb or has given up.
//
// Every wait keeps a deadline. When it passes, the first waiter of the GPU writes down whom it
// waited for, the kernel runs out without doing its work, and so does every later one of this
// Buffer; the host turns the record into a Python exception.
#pragma once

#include "device/ptx.cuh"
#include "layout/buffer_layout.h"
#include "layout/runtime_state.h"

namespace hybrid_ep::device {

using layout::Phase;

// The number of the call being made; read it before last_block() can have moved it on.
__device__ __forceinline__ uint64_t current_epoch(const DeviceState* state, Phase phase) {
    return *reinterpret_cast<const volatile uint64_t*>(&state->epoch[int(phase)]) + 1;
}

// Warps of a block may see it change at different times: one thread asks, for those who share work.
__device__ __forceinline__ bool has_fault(const DeviceState* state) {
    return ptx::load_volatile(&state->faulted) != 0;
}

// Any thread; the first one wins.
__device__ inline void report_fault(const Watch& watch, FaultKind kind, Phase phase, int peer,
                                    int channel, uint64_t epoch, uint64_t seen, uint64_t mine = 0) {
    if (atomicCAS(&watch.state->faulted, 0u, 1u) != 0u) return;
    volatile Fault* fault = watch.fault;
    fault->phase = int(phase);
    fault->peer = peer;
    fault->channel = channel;
    fault->epoch = epoch;
    fault->seen = seen;
    fault->mine = mine;
    ptx::store_release(const_cast<uint64_t*>(&fault->kind), uint64_t(kind));
}

// ---- announcements of verbs

// The number of the verb being made, where no kernel of the verb before may still run.
__device__ __forceinline__ uint64_t current_verb(const DeviceState* state) {
    auto* epoch = reinterpret_cast<const volatile uint64_t*>(state->epoch);
    return epoch[int(Phase::kRoute)] + epoch[int(Phase::kDispatch)] + epoch[int(Phase::kCombine)] +
           1;
}

__device__ __forceinline__ uint64_t announced_by(const Watch& watch, int peer, uint64_t mine) {
    return ptx::load_acquire(watch.calls + peer * layout::kCallWords +
                             layout::verb_of(mine) % layout::kAnnouncedVerbs);
}

// Waits for a free inbox belong to the combine that begins.
__device__ __forceinline__ uint64_t* announcement_at(DeviceState* state, Phase phase) {
    return &state->announcement[phase == Phase::kInboxFree ? int(Phase::kCombine) : int(phase)];
}

// For this rank's own waits, before peers hear of it.
__device__ __forceinline__ void remember_announcement(const Watch& watch, Phase phase,
                                                      uint64_t announcement) {
    *const_cast<volatile uint64_t*>(announcement_at(watch.state, phase)) = announcement;
}

// How often a wait looks at announcements: three loads, so not where a flag is about to come. About
// a millisecond.
constexpr uint32_t kPollsPerLook = 1024;

// Whether `peer`, which this rank waits for in vain, has given up, makes another verb than mine, or
// none, as another rank has found.
__device__ inline bool will_not_come(const Watch& watch, Phase phase, int peer, int channel,
                                     uint64_t epoch) {
    const uint64_t reason =
        ptx::load_acquire(watch.calls + peer * layout::kCallWords + layout::kGaveUpWord);
    if (reason != 0) {
        report_fault(watch, FaultKind::kPeerGaveUp, phase, peer, channel, epoch, reason);
        return true;
    }
    const uint64_t mine =
        *const_cast<const volatile uint64_t*>(announcement_at(watch.state, phase));
    const uint64_t theirs = announced_by(watch, peer, mine);
    if (theirs == 0 || layout::belong_together(theirs, mine) ||
        layout::verb_of(theirs) != layout::verb_of(mine)) {
        return false;
    }
    if (theirs == layout::nothing_announced(mine)) {  // passed on by a rank that waited first
        report_fault(watch, FaultKind::kTimeout, phase, peer, channel, epoch, (epoch - 1) << 16);
    } else {
        report_fault(watch, FaultKind::kOtherCall, phase, peer, channel, epoch, theirs, mine);
    }
    return true;
}

// An announcement to be waited for.
struct Awaited {
    Phase phase;
    uint64_t epoch, mine;  // what I announced
    int source;
    int through;  // the rank that passes it on, or the source itself
    uint64_t timeout_ns;
};

// Any single thread: what the source announces of the verb. If the deadline passes, that is
// reported and nothing_announced(); 0: another thread has failed.
__device__ inline uint64_t await_announced(const Watch& watch, const Awaited& a) {
    constexpr int kChannel = 0;  // of announcements there is one
    uint64_t start = 0;
    for (uint32_t polls = 1;; ++polls) {
        const uint64_t theirs = announced_by(watch, a.source, a.mine);
        if (theirs != 0 && layout::verb_of(theirs) == layout::verb_of(a.mine)) return theirs;
        if (polls % 64 != 0) continue;
        const uint64_t now = ptx::global_timer_ns();
        if (start == 0) start = now;
        if (has_fault(watch.state) || will_not_come(watch, a.phase, a.through, kChannel, a.epoch)) {
            return 0;
        }
        if (now - start > a.timeout_ns) {
            report_fault(watch, FaultKind::kTimeout, a.phase, a.through, kChannel, a.epoch,
                         (a.epoch - 1) << 16);
            return layout::nothing_announced(a.mine);
        }
    }
}

// ---- flags

// Waits until `flag`, which `peer` writes, reaches this call. Any single thread; acquires what the
// peer wrote before it signalled (for bulk copies of it, add fence_proxy_async). False: give up.
__device__ inline bool wait_flag(const uint64_t* flag, uint64_t epoch, uint32_t signature,
                                 const Watch& watch, Phase phase, int peer, int channel) {
    uint64_t seen = ptx::load_acquire(flag);
    uint64_t start = 0;
    for (uint32_t polls = 1; (seen >> 16) < epoch; ++polls) {
        if (polls % 64 == 0) {
            uint64_t now = ptx::global_timer_ns();
            if (start == 0) start = now;
            if (has_fault(watch.state)) return false;
            if (polls % kPollsPerLook == 0 && will_not_come(watch, phase, peer, channel, epoch)) {
                return false;
            }
            if (now - start > watch.timeout_ns) {
                report_fault(watch, FaultKind::kTimeout, phase, peer, channel, epoch, seen);
                return false;
            }
        }
        seen = ptx::load_acquire(flag);
    }
    if ((seen >> 16) == epoch && (seen & 0xFFFF) != signature) {
        report_fault(watch, FaultKind::kOtherCall, phase, peer, channel, epoch, seen);
        return false;
    }
    return true;
}

// What each of several puts adds to a flag when it has arrived: together one to the number in the
// flag, in whatever order they arrive. `nth` counts from 0.
__device__ __forceinline__ uint64_t share_of_step(int nth, bool is_last) {
    return is_last ? kFlagStep - nth : 1;
}

// The whole block waits for `channels` flags of every rank. False, for all threads: give up.
__device__ inline bool wait_all_flags(char* mine, const layout::BufferLayout& buffer, Phase phase,
                                      int channels, uint64_t epoch, uint32_t signature,
                                      const Watch& watch) {
    bool good = !has_fault(watch.state);
    for (int i = threadIdx.x; good && i < buffer.num_ranks * channels; i += blockDim.x) {
        int peer = i / channels, channel = i % channels;
        auto* flag = reinterpret_cast<const uint64_t*>(mine + buffer.flag(phase, peer, channel));
        good = wait_flag(flag, epoch, signature, watch, phase, peer, channel);
    }
    good = __syncthreads_and(good);
    ptx::fence_proxy_async();
    return good;
}

// The whole block, after its last write: tells every rank that this block has finished. Bulk
// stores must have been waited for by the threads that issued them.
__device__ inline void signal_all_ranks(const Peers& peers, const layout::BufferLayout& buffer,
                                        Phase phase, int rank, int channel, uint64_t epoch,
                                        uint32_t signature) {
    ptx::fence_proxy_async();
    __syncthreads();
    for (int peer = threadIdx.x; peer < buffer.num_ranks; peer += blockDim.x) {
        auto* flag =
            reinterpret_cast<uint64_t*>(peers.base[peer] + buffer.flag(phase, rank, channel));
        ptx::store_release(flag, flag_value(epoch, signature));
    }
}

// The whole block, at the end of a call's last kernel: true in the one block that is the last to
// get here, which closes the call. No block waits.
__device__ inline bool is_last_block(DeviceState* state) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&state->blocks_done, 1u) == gridDim.x - 1;
        if (last) {
            state->blocks_started = state->blocks_done = 0;
            state->steps_taken = state->tokens_taken = 0;
            __threadfence();
        }
    }
    __syncthreads();
    return last;
}

// One thread of the last block.
__device__ __forceinline__ void close_call(DeviceState* state, Phase phase, uint64_t epoch) {
    *reinterpret_cast<volatile uint64_t*>(&state->epoch[int(phase)]) = epoch;
}

}  // namespace hybrid_ep::device
