// Pulling, a part of dispatch: every copy that is mine lands in all its rows.
//
//   copies of the layout --look up, await their records--> jobs                            walker
//   job: record --TMA load over NVLink--> slot                                            loader
//   job: slot --TMA stores--> rows[row_i]                                                 storer
//   job: trailer in the slot --ordinary stores--> weights[row_i], scales[row_i]         spreader
//
// Where the record is one of a window, the spreader counts that it has been read.
#pragma once

#include "device/ring.cuh"
#include "kernels/dispatch/publish.cuh"

namespace hybrid_ep::kernels {

using layout::kSlotsRead;

constexpr int kJobs = 32;  // looked up and not stored yet

constexpr uint64_t kOneRead = 1ull << 16;  // counts lie where flags have the number of the call

// A slice of a copy: what to load, and where to store it.
struct Job {
    static constexpr int kEnd = -1;

    const char* from;
    const char* trailer;  // where it is if not behind the slice
    uint64_t* reads;      // counts that the copy has been read; or null
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

// A copy, as a walker has found it.
struct FoundCopy {
    layout::Copy copy;
    const int32_t* rows;  // [copy.num_rows]
    const char* record;   // of the token, readable
    bool is_mine;         // a token of this rank
    uint64_t* reads;      // counts the reads of the record; or null
};

// The walker's side of the jobs.
class JobList {
  public:
    __device__ JobList(const DispatchParams& p, const layout::HandleView& handle, PullSmem& smem)
        : p_(p), handle_(handle), smem_(smem) {}

    // At a time, for all lanes: more would not leave room for what is being moved.
    static __device__ int most_copies(const DispatchParams& p) {
        return max(kJobs / 2 / p.slices.num_slices, 1);
    }

    // The whole warp: the copies of those lanes that have one, slice by slice.
    __device__ void add(bool has_copy, const FoundCopy& found) {
        const uint32_t have = __ballot_sync(kAllLanes, has_copy);
        if (has_copy) {
            const int first = num_jobs_ + __popc(have & lanes_below()) * p_.slices.num_slices;
            for (int i = 0; i < p_.slices.num_slices; ++i) add_slice(found, i, first + i);
        }
        num_jobs_ += __popc(have) * p_.slices.num_slices;
        __syncwarp();
    }

    __device__ void end() {
        if (lane_id() != 0) return;
        begin_job(num_jobs_).num_rows = Job::kEnd;
        smem_.jobs.filled(turn(num_jobs_));
    }

  private:
    // One lane.
    __device__ void add_slice(const FoundCopy& found, int slice, int at) {
        const layout::Copy& copy = found.copy;
        const int offset = slice * p_.slices.slice_bytes;
        const bool is_last = slice + 1 == p_.slices.num_slices;
        // my own token that goes to no other rank is not in the outbox, but its trailer is
        const bool from_x = found.is_mine && __ldg(&handle_.num_others[copy.token]) == 0;
        const char* x = p_.sent.x + copy.token * p_.sent.x_stride;
        Job& job = begin_job(at);
        job.from = (from_x ? x : found.record) + offset;
        job.trailer = from_x ? found.record + p_.record.row_bytes : nullptr;
        job.reads = is_last ? found.reads : nullptr;
        job.offset = offset;
        job.bytes = min(p_.slices.slice_bytes, p_.record.row_bytes - offset);
        job.trailer_bytes = is_last ? p_.record.trailer_bytes() : 0;
        job.num_rows = copy.num_rows;
        job.first_place = copy.first_place;
#pragma unroll 8
        for (int i = 0; i < copy.num_rows; ++i) job.row[i] = __ldg(&found.rows[i]);
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
    int num_jobs_ = 0;
};

// One thread.
__device__ inline void load_slices(const Slots& slots, PullSmem& smem) {
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
            char* to = p.received.scales + int64_t(job.row[i]) * p.record.scale_bytes;
            reinterpret_cast<Unit*>(to)[at] = unit;
        }
    }
}

__device__ inline void spread_trailer(const DispatchParams& p, const Job& job,
                                      const char* trailer) {
    if (p.record.weight_bytes > 0 && lane_id() < job.num_rows) {
        auto* weights = reinterpret_cast<const float*>(trailer + p.record.weights_offset() -
                                                       p.record.scales_offset());
        p.received.weights[job.row[lane_id()]] = weights[job.first_place + lane_id()];
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
__device__ inline void store_slices(const DispatchParams& p, const Slots& slots, PullSmem& smem) {
    Turn at, slot, oldest;
    for (int num_stored = 1;; ++num_stored) {
        smem.jobs.await_filled(at);
        const Job& job = smem.job[at.at];
        if (job.num_rows == Job::kEnd) break;
        smem.slots.await_filled(slot);
        const char* landed = slots.bytes(slot.at);
        if (lane_id() < job.num_rows) {
            char* row = p.received.rows + int64_t(job.row[lane_id()]) * p.record.row_bytes;
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
__device__ inline void spread_trailers(const DispatchParams& p, const Slots& slots,
                                       PullSmem& smem) {
    Turn at, slot;
    while (true) {
        smem.jobs.await_filled(at);
        const Job& job = smem.job[at.at];
        if (job.num_rows == Job::kEnd) break;
        smem.slots.await_filled(slot);
        if (job.trailer_bytes > 0) spread_trailer(p, job, slots.bytes(slot.at) + job.bytes);
        __syncwarp();
        if (lane_id() == 0) {
            if (job.reads != nullptr) ptx::add_release(job.reads, kOneRead);
            smem.slots.freed(slot.at);
            smem.jobs.freed(at.at);
        }
        at.advance(kJobs);
        slot.advance(slots.size());
    }
}

}  // namespace hybrid_ep::kernels
