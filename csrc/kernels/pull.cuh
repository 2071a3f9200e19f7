// Pulling, a part of dispatch.cu: every copy that is mine lands in all its rows.
//
//   copies of the layout --look up, await their parcels--> jobs                            walker
//   job: outbox record of the source --TMA load over NVLink--> slot                       loader
//   job: slot --TMA stores--> rows[row_i]                                                 storer
//   job: trailer in the slot --ordinary stores--> weights[row_i], scales[row_i]         spreader
#pragma once

#include "device/copy_walk.cuh"
#include "device/ring.cuh"
#include "kernels/publish.cuh"

namespace hybrid_ep::kernels {

constexpr int kJobs = 32;      // looked up and not stored yet
constexpr int kUsers = 2;      // of a job and its slot: storer and spreader
constexpr int kSlotsRead = 4;  // the newest slots, which stores may still be reading

// A slice of a copy: what to load, and where to store it.
struct Job {
    static constexpr int kEnd = -1;

    const char* from;
    const char* trailer;  // where it is if not behind the slice
    int offset, bytes;    // of the slice in its row
    int trailer_bytes;    // the last slice brings the trailer
    int num_rows;         // kEnd: there is no more
    int first_place;      // of my experts among the token's distinct experts
    int row[layout::kMaxTopk];
};

struct PullSmem {
    Handover<kJobs> jobs;
    Job job[kJobs];
    SlotHandover slots;
    bool failed;  // a peer did not come: the call stays open
};

// Takes the next copies, a lane each, waits until they are announced, and lists their slices.
class Walker {
  public:
    __device__ Walker(const DispatchParams& p, const layout::HandleView& handle, PullSmem& smem,
                      uint64_t epoch)
        : p_(p),
          handle_(handle),
          smem_(smem),
          epoch_(epoch),
          walk_(handle, p.context.buffer.num_ranks, p.context.rank, p.context.buffer.num_ranks,
                &p.context.watch.state->steps_taken, gridDim.x,
                max(kJobs / 2 / p.slices.num_slices, 1)) {}

    __device__ void run() {
        CopyWalk::Taken mine;
        while (walk_.take(mine)) {
            const bool has_copy = mine.valid && mine.copy.num_rows > 0;
            if (!await_announced(has_copy, mine)) break;
            const uint32_t have = __ballot_sync(kAllLanes, has_copy);
            if (has_copy) {
                const int before = __popc(have & lanes_below()) * p_.slices.num_slices;
                for (int i = 0; i < p_.slices.num_slices; ++i)
                    list(mine, i, next_job_ + before + i);
            }
            next_job_ += __popc(have) * p_.slices.num_slices;
            __syncwarp();
        }
        if (lane_id() == 0) {
            begin_job(next_job_).num_rows = Job::kEnd;
            smem_.jobs.filled(turn(next_job_));
        }
    }

  private:
    __device__ bool await_announced(bool has_copy, const CopyWalk::Taken& mine) {
        const Stopwatch waiting(p_.context.trace);
        bool good = true;
        if (has_copy && publishes(p_)) {
            const int parcel = mine.copy.token / kParcelTokens;
            const uint64_t* flag = flag_in(p_, p_.context.rank, mine.source, parcel);
            good = wait_flag(flag, epoch_, p_.record.signature(), p_.context.watch,
                             Phase::kDispatch, mine.source, parcel);
            ptx::fence_proxy_async();
        }
        good = __all_sync(kAllLanes, good);
        if (lane_id() == 0) {
            if (!good) smem_.failed = true;
            waiting.note(Span::kAwaitRows, epoch_);
        }
        return good;
    }

    // One lane.
    __device__ void list(const CopyWalk::Taken& mine, int slice, int at) {
        const layout::Copy& copy = mine.copy;
        const int offset = slice * p_.slices.slice_bytes;
        // my own token that goes to nobody else is not in the outbox, but its trailer is
        const bool from_x =
            mine.source == p_.context.rank && __ldg(&handle_.num_others[copy.token]) == 0;
        const char* record =
            p_.context.peers.base[mine.source] + p_.context.buffer.record(epoch_, copy.token);
        Job& job = begin_job(at);
        job.from = (from_x ? p_.tokens.x + copy.token * p_.tokens.x_stride : record) + offset;
        job.trailer = from_x ? record + p_.record.row_bytes : nullptr;
        job.offset = offset;
        job.bytes = min(p_.slices.slice_bytes, p_.record.row_bytes - offset);
        job.trailer_bytes = slice + 1 == p_.slices.num_slices ? p_.record.trailer_bytes() : 0;
        job.num_rows = copy.num_rows;
        job.first_place = copy.first_place;
#pragma unroll 8
        for (int i = 0; i < copy.num_rows; ++i) job.row[i] = __ldg(&mine.rows[i]);
        smem_.jobs.filled(turn(at));
    }

    __device__ static Turn turn(int job) { return Turn::of(job, kJobs); }
    __device__ Job& begin_job(int job) {
        smem_.jobs.await_free(turn(job));
        return smem_.job[job % kJobs];
    }

    const DispatchParams& p_;
    const layout::HandleView& handle_;
    PullSmem& smem_;
    uint64_t epoch_;
    CopyWalk walk_;
    int next_job_ = 0;
};

// One thread.
__device__ void load_slices(const Slots& slots, PullSmem& smem) {
    Turn at, slot;
    while (true) {
        smem.jobs.await_filled(at);
        const Job& job = smem.job[at.at];
        if (job.num_rows == Job::kEnd) break;
        const char *from = job.from, *trailer = job.trailer;
        const int bytes = job.bytes, trailer_bytes = job.trailer_bytes;
        const bool apart = trailer_bytes > 0 && trailer != nullptr;
        smem.slots.await_free(slot);
        smem.slots.filled_by(slot, bytes + trailer_bytes);
        char* to = slots.bytes(slot.at);
        ptx::bulk_load(to, from, apart ? bytes : bytes + trailer_bytes, smem.slots.barrier(slot));
        if (apart) ptx::bulk_load(to + bytes, trailer, trailer_bytes, smem.slots.barrier(slot));
        at.advance(kJobs);
        slot.advance(slots.size());
    }
}

// A copy's scales to all its rows, `Unit` by unit. Ordinary stores: so few bytes are not worth a
// bulk copy each.
template <typename Unit>
__device__ __forceinline__ void spread_scales(const DispatchParams& p, const Job& job,
                                              const char* trailer) {
    const int count = p.record.scale_bytes / int(sizeof(Unit));
    for (int at = lane_id(); at < count; at += kWarp) {
        const Unit unit = reinterpret_cast<const Unit*>(trailer)[at];
        for (int i = 0; i < job.num_rows; ++i) {
            char* to = p.rows.scales + int64_t(job.row[i]) * p.record.scale_bytes;
            reinterpret_cast<Unit*>(to)[at] = unit;
        }
    }
}

__device__ void spread_trailer(const DispatchParams& p, const Job& job, const char* trailer) {
    if (p.record.weight_bytes > 0 && lane_id() < job.num_rows) {
        auto* weights = reinterpret_cast<const float*>(trailer + p.record.weights_offset() -
                                                       p.record.scales_offset());
        p.rows.weights[job.row[lane_id()]] = weights[job.first_place + lane_id()];
    }
    const int scale_bytes = p.record.scale_bytes;
    if (scale_bytes % int(sizeof(uint4)) == 0) {
        spread_scales<uint4>(p, job, trailer);
    } else if (scale_bytes % int(sizeof(int)) == 0) {
        spread_scales<int>(p, job, trailer);
    } else {
        spread_scales<char>(p, job, trailer);
    }
}

// The whole warp.
__device__ void store_slices(const DispatchParams& p, const Slots& slots, PullSmem& smem) {
    Turn at, slot, oldest;
    for (int num_stored = 1;; ++num_stored) {
        smem.jobs.await_filled(at);
        const Job& job = smem.job[at.at];
        if (job.num_rows == Job::kEnd) break;
        smem.slots.await_filled(slot);
        const char* landed = slots.bytes(slot.at);
        if (lane_id() < job.num_rows) {
            char* row = p.rows.x + int64_t(job.row[lane_id()]) * p.record.row_bytes;
            ptx::bulk_store_evict_first(row + job.offset, landed, job.bytes);
        }
        ptx::bulk_commit();
        __syncwarp();
        if (lane_id() == 0) smem.jobs.freed(at.at);
        at.advance(kJobs);
        slot.advance(slots.size());
        ptx::bulk_wait_read<kSlotsRead>();
        __syncwarp();
        if (num_stored <= kSlotsRead) continue;
        if (lane_id() == 0) smem.slots.freed(oldest.at);
        oldest.advance(slots.size());
    }
    ptx::bulk_wait_written<0>();
}

// The whole warp, a warp of its own: the storer has enough to do.
__device__ void spread_trailers(const DispatchParams& p, const Slots& slots, PullSmem& smem) {
    Turn at, slot;
    while (true) {
        smem.jobs.await_filled(at);
        const Job& job = smem.job[at.at];
        if (job.num_rows == Job::kEnd) break;
        smem.slots.await_filled(slot);
        if (job.trailer_bytes > 0) spread_trailer(p, job, slots.bytes(slot.at) + job.bytes);
        __syncwarp();
        if (lane_id() == 0) {
            smem.slots.freed(slot.at);
            smem.jobs.freed(at.at);
        }
        at.advance(kJobs);
        slot.advance(slots.size());
    }
}

}  // namespace hybrid_ep::kernels
