// Dispatch, in one kernel: my tokens become readable for my peers, and every copy that is mine is
// pulled once and lands in all its rows.
//
//   publish   x[t], scales, weights --> outbox record [row | scales | weights], parcel by parcel;
//             a flag in every peer announces the parcel
//   pull      outbox record of the source --TMA load over NVLink--> slot
//             slot --TMA stores--> rows[row_i], weights[row_i], scales[row_i]
//
// Publishing and pulling are done by different warps of each block and do not wait for each other,
// so no two ranks ever do. Only tokens that go to a peer are published, others come from x.
// The two may also be two launches, with the host's wait for the number of rows between them.
#include "device/copy_walk.cuh"
#include "device/flag.cuh"
#include "device/ring.cuh"
#include "device/trace.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.cuh"

namespace hybrid_ep::kernels {
namespace {

using namespace device;
using layout::kParcelTokens;
using layout::Phase;

// Warps: the walker looks up copies and waits until their sources have announced them; the loader
// starts all bulk loads, the storer all stores of what has landed; the writers publish and the
// herald announces, which takes microseconds; the sweepers zero the padding.
constexpr int kWriters = 4, kSweepers = 2;
enum Role { kWalker = 0, kLoader = 1, kStorer = 2, kHerald = 3, kFirstSweeper = 4 };
constexpr int kFirstWriter = kFirstSweeper + kSweepers;
constexpr int kThreads = (kFirstWriter + kWriters) * kWarp;

constexpr int kJobs = 32;           // looked up and not stored yet
constexpr int kSlotsRead = 4;       // the newest slots, which stores may still be reading
constexpr int kVectorsAtOnce = 14;  // of 16 bytes, that a thread has under way when it publishes

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

struct Smem {
    Handover<kJobs> jobs;
    Job job[kJobs];
    SlotHandover slots;
    uint32_t parcels_written[kWriters];  // of this block, so far
    bool failed;                         // a peer did not come: the call stays open
};

// A rank by itself has nobody to publish for, but its trailers take the way of all.
__device__ __forceinline__ bool publishes(const DispatchParams& p) {
    return p.context.buffer.num_ranks > 1 || p.record.trailer_bytes() > 0;
}

__device__ uint64_t* flag_in(const DispatchParams& p, int owner, int source, int channel) {
    return reinterpret_cast<uint64_t*>(p.context.peers.base[owner] +
                                       p.context.buffer.flag(Phase::kDispatch, source, channel));
}

// ---- pull

// Takes the next copies, a lane each, waits until they are announced, and lists their slices.
class Walker {
  public:
    __device__ Walker(const DispatchParams& p, const layout::HandleView& handle, Smem& smem,
                      uint64_t epoch)
        : p_(p),
          handle_(handle),
          smem_(smem),
          epoch_(epoch),
          walk_(handle, p.context.buffer.num_ranks, p.context.rank,
                &p.context.watch.state->steps_taken, gridDim.x) {}

    __device__ void run() {
        const int most = max(kJobs / 2 / p_.slices.num_slices, 1);
        CopyWalk::Taken mine;
        while (walk_.take(most, mine)) {
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
        const bool from_x = mine.source == p_.context.rank &&
                            !(__ldg(&handle_.home_copies[copy.token]) & handle_.kTravels);
        const char* record =
            p_.context.peers.base[mine.source] + p_.context.buffer.record(epoch_, copy.token);
        Job& job = begin_job(at);
        job.from = (from_x ? p_.x + copy.token * p_.x_stride : record) + offset;
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

    __device__ static Turn turn(int job) { return {job % kJobs, uint32_t(job / kJobs) & 1}; }
    __device__ Job& begin_job(int job) {
        smem_.jobs.await_free(turn(job));
        return smem_.job[job % kJobs];
    }

    const DispatchParams& p_;
    const layout::HandleView& handle_;
    Smem& smem_;
    uint64_t epoch_;
    CopyWalk walk_;
    int next_job_ = 0;
};

// One thread.
__device__ void load_slices(const Slots& slots, Smem& smem) {
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
            char* to = p.row_scales + int64_t(job.row[i]) * p.record.scale_bytes;
            reinterpret_cast<Unit*>(to)[at] = unit;
        }
    }
}

__device__ void spread_trailer(const DispatchParams& p, const Job& job, const char* trailer) {
    if (p.record.weight_bytes > 0 && lane_id() < job.num_rows) {
        auto* weights = reinterpret_cast<const float*>(trailer + p.record.weights_offset() -
                                                       p.record.scales_offset());
        p.row_weights[job.row[lane_id()]] = weights[job.first_place + lane_id()];
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
__device__ void store_slices(const DispatchParams& p, const Slots& slots, Smem& smem) {
    Turn at, slot, oldest;
    for (int num_stored = 1;; ++num_stored) {
        smem.jobs.await_filled(at);
        const Job& job = smem.job[at.at];
        if (job.num_rows == Job::kEnd) break;
        smem.slots.await_filled(slot);
        const char* landed = slots.bytes(slot.at);
        if (lane_id() < job.num_rows) {
            ptx::bulk_store(p.rows + int64_t(job.row[lane_id()]) * p.record.row_bytes + job.offset,
                            landed, job.bytes);
        }
        if (job.trailer_bytes > 0) spread_trailer(p, job, landed + job.bytes);
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

// ---- publish

// The whole warp.
__device__ void copy_row(char* to, const char* from, int bytes) {
    const int count = bytes / 16;
    auto* target = reinterpret_cast<uint4*>(to);
    auto* source = reinterpret_cast<const uint4*>(from);
    for (int first = lane_id(); first < count; first += kVectorsAtOnce * kWarp) {
        uint4 vector[kVectorsAtOnce];
#pragma unroll
        for (int i = 0; i < kVectorsAtOnce; ++i) {
            if (first + i * kWarp < count) vector[i] = __ldcs(source + first + i * kWarp);
        }
#pragma unroll
        for (int i = 0; i < kVectorsAtOnce; ++i) {
            if (first + i * kWarp < count) target[first + i * kWarp] = vector[i];
        }
    }
}

// The writer's rows of a parcel.
__device__ void write_rows(const DispatchParams& p, const layout::HandleView& handle, int writer,
                           int parcel, uint64_t epoch) {
    const int64_t token = int64_t(parcel) * kParcelTokens + lane_id();
    const bool travels = lane_id() < kParcelTokens && token < p.num_tokens &&
                         (__ldg(&handle.home_copies[token]) & layout::HandleView::kTravels);
    uint32_t left = __ballot_sync(kAllLanes, travels);
    for (int turn = 0; left != 0; ++turn, left &= left - 1) {
        if (turn % kWriters != writer) continue;
        const int64_t mine = int64_t(parcel) * kParcelTokens + __ffs(left) - 1;
        copy_row(p.context.peers.base[p.context.rank] + p.context.buffer.record(epoch, mine),
                 p.x + mine * p.x_stride, p.record.row_bytes);
    }
}

// The writers' part of a parcel's trailers: scales as they are; weights by place (the order of the
// token's distinct experts), those of repeated experts added, as the peers' rows refer to them.
__device__ void write_trailers(const DispatchParams& p, const layout::HandleView& handle,
                               int writer, int parcel, uint64_t epoch) {
    const int64_t first = int64_t(parcel) * kParcelTokens;
    const int count = int(min(int64_t(kParcelTokens), p.num_tokens - first));
    const int64_t record_bytes = p.context.buffer.record_bytes;
    char* trailers = p.context.peers.base[p.context.rank] + p.context.buffer.record(epoch, first) +
                     p.record.scales_offset();

    const bool wide = p.record.scale_bytes % 4 == 0 && p.scales_stride % 4 == 0;
    const int step = wide ? 4 : 1, units = p.record.scale_bytes / step;
#pragma unroll 4
    for (int i = writer * kWarp + lane_id(); i < count * units; i += kWriters * kWarp) {
        const int in_parcel = i / units, at = (i - in_parcel * units) * step;
        const char* from = p.scales + (first + in_parcel) * p.scales_stride + at;
        char* to = trailers + in_parcel * record_bytes + at;
        if (wide) {
            *reinterpret_cast<int*>(to) = __ldg(reinterpret_cast<const int*>(from));
        } else {
            *to = __ldg(from);
        }
    }
    if (p.record.weight_bytes == 0) return;

    const int topk = p.context.buffer.topk, per_step = kWarp / topk;
    const int group = lane_id() / topk, slot = lane_id() % topk;
    for (int base = writer * per_step; base < count; base += kWriters * per_step) {
        const int in_parcel = base + group;
        const int64_t token = first + in_parcel;
        const bool active = group < per_step && in_parcel < count;
        const float weight = active ? __ldg(&p.weights[token * p.weights_stride + slot]) : 0.f;
        const int place = active ? handle.places[token * topk + slot] : -1;
        float sum = 0.f;
        for (int j = 0; j < topk; ++j) {
            const int lane = min(group * topk + j, kWarp - 1);
            const float other = __shfl_sync(kAllLanes, weight, lane);
            if (__shfl_sync(kAllLanes, place, lane) == slot) sum = __fadd_rn(sum, other);
        }
        auto* weights =
            reinterpret_cast<float*>(trailers + in_parcel * record_bytes +
                                     p.record.weights_offset() - p.record.scales_offset());
        if (active) weights[slot] = sum;
    }
}

__device__ void write_parcels(const DispatchParams& p, const layout::HandleView& handle, Smem& smem,
                              int writer, uint64_t epoch) {
    const Stopwatch writing(p.context.trace);
    int num_written = 0;
    for (int parcel = p.first_parcel + blockIdx.x; parcel < p.end_parcel; parcel += gridDim.x) {
        write_rows(p, handle, writer, parcel, epoch);
        write_trailers(p, handle, writer, parcel, epoch);
        __threadfence_block();  // the herald's fence is for all
        __syncwarp();
        ++num_written;
        if (lane_id() == 0) volatile_store(smem.parcels_written[writer], uint32_t(num_written));
    }
    if (writer == 0 && lane_id() == 0) writing.note(Span::kPublishRows, epoch);
}

// The block's parcels in turn, as many at once as are written: a fence for the whole system takes
// longer than writing a parcel.
__device__ void announce_parcels(const DispatchParams& p, const Smem& smem, uint64_t epoch) {
    const auto& b = p.context.buffer;
    const auto* written = static_cast<const volatile uint32_t*>(smem.parcels_written);
    const uint64_t value = flag_value(epoch, p.record.signature());
    auto parcel = [&](int i) { return p.first_parcel + int(blockIdx.x) + i * int(gridDim.x); };
    int announced = 0;
    while (parcel(announced) < p.end_parcel) {
        const int ready = int(__reduce_min_sync(kAllLanes, written[lane_id() % kWriters]));
        if (ready == announced) continue;
        ptx::fence_system();
        const int num_flags = (ready - announced) * b.num_ranks;
        for (int i = lane_id(); i < num_flags; i += kWarp) {
            const int peer = i % b.num_ranks, at = parcel(announced + i / b.num_ranks);
            ptx::store_relaxed(flag_in(p, peer, p.context.rank, at), value);
        }
        announced = ready;
        __syncwarp();
    }
}

// ---- the call as a whole

// One warp of the grid, at its beginning: this rank has finished the call before.
__device__ void announce_arrival(const DispatchParams& p, uint64_t epoch) {
    const auto& b = p.context.buffer;
    for (int peer = lane_id(); peer < b.num_ranks; peer += kWarp) {
        ptx::store_release(flag_in(p, peer, p.context.rank, b.arrival_channel()),
                           flag_value(epoch, p.record.signature()));
    }
}

// And before the call ends: all peers make it too, even those that I have no copy from. So none of
// them still pulls the call before, and the next call may overwrite its half of my outbox.
__device__ void await_arrivals(const DispatchParams& p, Smem& smem, uint64_t epoch) {
    const auto& b = p.context.buffer;
    bool good = true;
    for (int peer = lane_id(); good && peer < b.num_ranks; peer += kWarp) {
        good = wait_flag(flag_in(p, p.context.rank, peer, b.arrival_channel()), epoch,
                         p.record.signature(), p.context.watch, Phase::kDispatch, peer,
                         b.arrival_channel());
    }
    if (!good) smem.failed = true;
}

// ---- padding

__device__ void zero_row(const DispatchParams& p, int64_t row) {
    auto* to = reinterpret_cast<uint4*>(p.rows + row * p.record.row_bytes);
    for (int i = lane_id(); i < p.record.row_bytes / 16; i += kWarp) to[i] = uint4{};
    char* scales = p.row_scales + row * p.record.scale_bytes;
    for (int i = lane_id(); i < p.record.scale_bytes; i += kWarp) scales[i] = 0;
    if (lane_id() == 0 && p.record.weight_bytes > 0) p.row_weights[row] = 0.f;
}

// The end of each expert's group, and the tail after the last.
__device__ void zero_padding(const DispatchParams& p, const layout::HandleView& handle, int sweeper,
                             uint64_t epoch) {
    if (!handle.header[layout::HandleLayout::kMayHavePadding]) return;
    const Stopwatch zeroing(p.context.trace);
    const int experts = p.context.buffer.num_local_experts;
    const int first = blockIdx.x * kSweepers + sweeper, step = gridDim.x * kSweepers;
    for (int e = 0; e <= experts; ++e) {
        int64_t begin = handle.offsets[e] + (e < experts ? handle.counts[e] : 0);
        int64_t end = e < experts ? handle.offsets[e + 1] : p.num_rows;
        for (int64_t row = begin + first; row < end; row += step) zero_row(p, row);
    }
    if (sweeper == 0 && lane_id() == 0) zeroing.note(Span::kZeroPadding, epoch);
}

// A role of pulling, for a call whose routing failed: there are no rows to look at.
__device__ void give_up(int role, Smem& smem) {
    if (role != kWalker || lane_id() != 0) return;
    smem.failed = true;
    smem.job[0].num_rows = Job::kEnd;
    smem.jobs.filled(Turn{});
}

__device__ __forceinline__ void play(int role, const DispatchParams& p,
                                     const layout::HandleView& handle, const Slots& slots,
                                     Smem& smem, uint64_t epoch) {
    const bool is_first_sweeper = blockIdx.x == 0 && role == kFirstSweeper;
    if (is_first_sweeper) announce_arrival(p, epoch);
    if (role >= kFirstWriter) {
        if (publishes(p)) write_parcels(p, handle, smem, role - kFirstWriter, epoch);
    } else if (role == kHerald) {
        if (publishes(p)) announce_parcels(p, smem, epoch);
    }
    if (!p.pulls || role == kHerald || role >= kFirstWriter) return;

    // publishing needs what publish_routing wrote, pulling what assign_rows did
    ptx::await_kernel_before();
    if (has_fault(p.context.watch.state)) return give_up(role, smem);
    const Stopwatch pulling(p.context.trace);
    if (role == kWalker) {
        Walker(p, handle, smem, epoch).run();
    } else if (role == kLoader) {
        if (lane_id() == 0) load_slices(slots, smem);
    } else if (role == kStorer) {
        store_slices(p, slots, smem);
        if (lane_id() == 0) pulling.note(Span::kPullRows, epoch);
    } else {
        zero_padding(p, handle, role - kFirstSweeper, epoch);
        if (is_first_sweeper) await_arrivals(p, smem, epoch);
    }
}

__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    const Slots slots(dynamic_smem, p.ring);
    const Watch& watch = p.context.watch;
    if (threadIdx.x == 0) {
        smem.jobs.init(kJobs, 1);
        smem.slots.init(slots.size(), 1);
        smem.failed = has_fault(watch.state);
    }
    if (threadIdx.x < kWriters) smem.parcels_written[threadIdx.x] = 0;
    __syncthreads();
    if (smem.failed) return;
    const uint64_t epoch = current_epoch(watch.state, Phase::kDispatch);
    const layout::HandleView handle(p.words, p.context.handle);
    play(warp_id(), p, handle, slots, smem, epoch);
    __syncthreads();
    if (p.pulls && !smem.failed && is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kDispatch, epoch);
    }
}

}  // namespace

void launch_dispatch(const DispatchParams& p, cudaStream_t stream) {
    const auto launch_it =
        p.behind_routing ? launch_behind_ours<DispatchParams> : launch<DispatchParams>;
    launch_it(dispatch, p, p.num_blocks, kThreads, layout::dynamic_smem_bytes(p.ring, 1), stream);
}

}  // namespace hybrid_ep::kernels
