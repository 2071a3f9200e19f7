// Dispatch, in one kernel: my tokens become readable for my peers, and every copy that is mine is
// pulled once and lands in all its rows.
//
//   publish   x[t] --TMA load--> slot --TMA store--> outbox record [row | scales | weights]
//   pull      outbox record of the source --TMA load over NVLink--> slot --TMA stores-->
//   rows[row_i]
//                                                  weights[row_i], scales[row_i] <--'
//
// A block publishes parcels of kParcelTokens tokens, each announced by a flag in every peer, and
// pulls the copies that are dealt to it. Only tokens that go to a peer are published: my own copies
// come from x. Publishing keeps a little ahead of pulling, so that NVLink carries something from
// the first microseconds to the last; and whoever would wait for a peer publishes first, so no two
// ranks wait for each other. The two halves may also be two launches, with the host's wait for the
// number of rows between them.
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

// Warps: one starts all loads, one all stores of what has landed; one looks up the copies to pull
// and waits until their sources have announced them; one announces my parcels to the peers, which
// takes microseconds; the last ones write what is no row: weights and scales to the outbox, zeros
// to the padding.
enum Role { kLoader = 0, kStorer = 1, kWalker = 2, kHerald = 3, kFirstWriter = 4 };
constexpr int kWriters = 4;
constexpr int kThreads = (kFirstWriter + kWriters) * kWarp;
constexpr int kSlotsRead = 4;      // the newest slots, which stores may still be reading
constexpr int kSlotsWritten = 16;  // the newest whose stores need not have arrived
constexpr int kLeadTokens = 64;    // of publishing before pulling

struct Smem {
    SlotHandover slots;
    CopyBatches copies;
    // of this block, so far
    uint32_t parcels_stored;    // by the storer, written for everybody to see
    uint32_t trailers_written;  // parcels times writers
    bool failed;                // a peer did not come: the call stays open
};

// Behind a slot: where to store what has landed.
struct SlotHeader {
    static constexpr int kEnd = -1, kSettle = -2;  // for num_targets: nothing landed

    char* to;
    int64_t stride;  // target i is to + target[i] * stride
    int bytes, num_targets;
    int first_place;   // of a trailer behind the row, to be spread; -1: none
    bool ends_parcel;  // once this is written, the parcel may be announced
    int target[layout::kMaxTopk];
};

// A rank by itself has nobody to publish for, but its trailers take the way of all.
__device__ __forceinline__ bool publishes(const DispatchParams& p) {
    return p.publishes && (p.context.buffer.num_ranks > 1 || p.record.trailer_bytes() > 0);
}

// The block's parcels, one after the other: which of their tokens travel.
class ParcelWalk {
  public:
    __device__ ParcelWalk(const DispatchParams& p, const layout::HandleView& handle)
        : p_(p), handle_(handle), ahead_(travels(blockIdx.x)) {
        open(blockIdx.x);
    }

    __device__ bool more() const { return parcel_ * kParcelTokens < p_.num_tokens; }
    __device__ int num_passed() const { return num_passed_; }

    // The next token of the parcel, -1 if none travels; `last`: the parcel is complete with it.
    __device__ int64_t next(bool& last) {
        const int in_parcel = __ffs(left_) - 1;
        const int64_t token = in_parcel < 0 ? -1 : int64_t(parcel_) * kParcelTokens + in_parcel;
        left_ &= left_ - 1;
        last = left_ == 0;
        ++num_passed_;
        return token;
    }
    __device__ void close_parcel() {
        num_passed_ = layout::round_up(num_passed_, kParcelTokens);
        open(parcel_ + gridDim.x);
    }

  private:
    __device__ void open(int parcel) {
        parcel_ = parcel;
        left_ = __ballot_sync(kAllLanes, ahead_);
        ahead_ = travels(parcel + gridDim.x);  // looked up long before it is needed
    }
    __device__ bool travels(int parcel) const {
        const int64_t token = int64_t(parcel) * kParcelTokens + lane_id();
        if (lane_id() >= kParcelTokens || token >= p_.num_tokens) return false;
        return __ldg(&handle_.home_copies[token]) & layout::HandleView::kTravels;
    }

    const DispatchParams& p_;
    const layout::HandleView& handle_;
    int parcel_ = 0, num_passed_ = 0;
    uint32_t left_ = 0;
    bool ahead_;
};

// The batches of copies from the walker, one copy after the other.
class CopyQueue {
  public:
    __device__ explicit CopyQueue(CopyBatches& batches) : batches_(batches) {}

    // Whether next() has an answer without waiting.
    __device__ bool is_ready() {
        if (over_ || next_ < num_copies_) return true;
        return __any_sync(kAllLanes, batches_.handover.is_filled(turn_));
    }
    // Points at the next copy; false: there is no more.
    __device__ bool next(const CopyBatch*& batch, int& at) {
        if (!over_ && next_ == num_copies_) open_batch();
        if (over_) return false;
        batch = &batches_.batch[turn_.at];
        at = next_;
        return true;
    }
    __device__ void advance() {
        if (++next_ < num_copies_) return;
        __syncwarp();
        if (lane_id() == 0) batches_.handover.freed(turn_.at);
        turn_.advance(CopyBatches::kSize);
        next_ = num_copies_ = 0;
    }
    __device__ bool over() const { return over_; }

  private:
    __device__ void open_batch() {
        batches_.handover.await_filled(turn_);
        num_copies_ = batches_.batch[turn_.at].num_copies;
        over_ = num_copies_ == 0;
        next_ = 0;
    }

    CopyBatches& batches_;
    Turn turn_;
    int next_ = 0, num_copies_ = 0;
    bool over_ = false;
};

class Loader {
  public:
    __device__ Loader(const DispatchParams& p, const layout::HandleView& handle, const Slots& slots,
                      Smem& smem, uint64_t epoch)
        : p_(p),
          slots_(slots),
          smem_(smem),
          epoch_(epoch),
          parcels_(p, handle),
          copies_(smem.copies) {
        const int parcels = layout::ceil_div(p.num_tokens, kParcelTokens);
        tokens_ = float(layout::ceil_div(parcels, int(gridDim.x)) * kParcelTokens);
    }

    __device__ void run(const Trace& trace) {
        const Stopwatch stopwatch(trace);
        bool publishing = publishes(p_);
        while (true) {
            if (publishing && parcels_.more()) {
                if (!p_.pulls || copies_.over() || is_behind() || !copies_.is_ready()) {
                    publish_token();
                    continue;
                }
            } else if (publishing) {
                publishing = false;
                if (lane_id() == 0) stopwatch.note(Span::kPublishRows, epoch_);
            }
            if (!p_.pulls) break;
            if (!copies_.is_ready()) tell_storer(SlotHeader::kSettle);
            if (!pull_copy() && !publishing) break;
        }
        tell_storer(SlotHeader::kEnd);
        if (p_.pulls && lane_id() == 0) stopwatch.note(Span::kPullRows, epoch_);
    }

  private:
    // All ranks pull tokens in order and at about the same pace.
    __device__ bool is_behind() const {
        return float(parcels_.num_passed()) < progress_ * tokens_ + kLeadTokens;
    }

    __device__ void publish_token() {
        bool last_token;
        const int64_t token = parcels_.next(last_token);
        const int num_slices = token < 0 ? 1 : p_.slices.num_slices;
        for (int slice = 0; slice < num_slices; ++slice) {
            const int offset = slice * p_.slices.slice_bytes;
            const int bytes =
                token < 0 ? 0 : min(p_.slices.slice_bytes, p_.record.row_bytes - offset);
            SlotHeader& header = begin_slot();
            if (lane_id() == 0) {
                header.to = mine() + p_.context.buffer.record(epoch_, 0) + offset;
                header.stride = p_.context.buffer.record_bytes;
                header.bytes = bytes;
                header.num_targets = token < 0 ? 0 : 1;
                header.ends_parcel = last_token && slice + 1 == num_slices;
                header.first_place = -1;
                header.target[0] = int(token);
            }
            if (fill_slot(bytes)) load(0, p_.x + token * p_.x_stride + offset, bytes);
            advance();
        }
        if (last_token) parcels_.close_parcel();
    }

    // False: there is no copy left.
    __device__ bool pull_copy() {
        const CopyBatch* batch;
        int at;
        if (!copies_.next(batch, at)) return false;
        const layout::Copy copy = batch->copy[at];
        const int source = batch->source[at];
        const int row =
            lane_id() < copy.num_rows ? batch->row[batch->first_row[at] + lane_id()] : 0;
        const int num_slices = copy.num_rows > 0 ? p_.slices.num_slices : 0;
        const int64_t record = p_.context.buffer.record(epoch_, copy.token);
        for (int slice = 0; slice < num_slices; ++slice) {
            const int offset = slice * p_.slices.slice_bytes;
            const int bytes = min(p_.slices.slice_bytes, p_.record.row_bytes - offset);
            const int trailer = slice + 1 == num_slices ? p_.record.trailer_bytes() : 0;
            SlotHeader& header = begin_slot();
            header.target[lane_id()] = row;
            if (lane_id() == 0) {
                header.to = p_.rows + offset;
                header.stride = p_.record.row_bytes;
                header.bytes = bytes;
                header.num_targets = copy.num_rows;
                header.ends_parcel = false;
                header.first_place = trailer > 0 ? copy.first_place : -1;
            }
            if (fill_slot(bytes + trailer)) {
                if (source != p_.context.rank) {
                    load(0, p_.context.peers.base[source] + record + offset, bytes + trailer);
                } else {
                    load(0, p_.x + copy.token * p_.x_stride + offset, bytes);
                    if (trailer > 0) load(bytes, mine() + record + p_.record.row_bytes, trailer);
                }
            }
            advance();
        }
        progress_ = batch->progress;
        copies_.advance();
        return true;
    }

    __device__ SlotHeader& begin_slot() {
        smem_.slots.await_free(turn_);
        return slots_.header<SlotHeader>(turn_.at);
    }
    // Before the loader waits for a peer, all that it has loaded must get on its way: the peer may
    // be waiting for it.
    __device__ void tell_storer(int what) {
        SlotHeader& header = begin_slot();
        if (lane_id() == 0) header.num_targets = what;
        fill_slot(0);
        advance();
    }
    // Behind the header: the lane that it is true for starts loads of so many bytes.
    __device__ bool fill_slot(int bytes) {
        __syncwarp();
        if (lane_id() != 0) return false;
        smem_.slots.filled_by(turn_, bytes);
        return bytes > 0;
    }
    __device__ void load(int offset, const char* from, int bytes) {
        ptx::bulk_load(slots_.bytes(turn_.at) + offset, from, bytes, smem_.slots.barrier(turn_));
    }
    __device__ void advance() { turn_.advance(slots_.size()); }
    __device__ char* mine() const { return p_.context.peers.base[p_.context.rank]; }

    const DispatchParams& p_;
    const Slots& slots_;
    Smem& smem_;
    uint64_t epoch_;
    ParcelWalk parcels_;
    CopyQueue copies_;
    Turn turn_;
    float tokens_;        // that this block publishes
    float progress_ = 0;  // of the walk over all copies
};

class Storer {
  public:
    __device__ Storer(const DispatchParams& p, const Slots& slots, Smem& smem)
        : p_(p), slots_(slots), smem_(smem) {}

    // A slot is free when its stores have read it, a parcel complete when they are written.
    __device__ void run() {
        while (true) {
            smem_.slots.await_filled(turn_);
            const SlotHeader& header = slots_.header<SlotHeader>(turn_.at);
            const int num_targets = header.num_targets;
            if (num_targets == SlotHeader::kEnd) break;
            if (num_targets > 0) store(header, slots_.bytes(turn_.at));
            ptx::bulk_commit();
            ends_parcel_ = ends_parcel_ << 1 | uint32_t(num_targets >= 0 && header.ends_parcel);
            turn_.advance(slots_.size());
            ++num_stored_;
            if (num_targets == SlotHeader::kSettle) {
                settle<0, 0>();
            } else {
                settle<kSlotsRead, kSlotsWritten>();
            }
        }
        settle<0, 0>();
    }

  private:
    __device__ void store(const SlotHeader& header, const char* slot) const {
        if (lane_id() < header.num_targets) {
            ptx::bulk_store(header.to + header.target[lane_id()] * header.stride, slot,
                            header.bytes);
        }
        if (header.first_place >= 0) spread_trailer(header, slot + header.bytes);
    }

    __device__ void spread_trailer(const SlotHeader& header, const char* trailer) const {
        const int lane = lane_id(), scale_bytes = p_.record.scale_bytes;
        const bool has_row = lane < header.num_targets;
        if (p_.record.weight_bytes > 0 && has_row) {
            auto* weights = reinterpret_cast<const float*>(trailer + p_.record.weights_offset() -
                                                           p_.record.scales_offset());
            p_.row_weights[header.target[lane]] = weights[header.first_place + lane];
        }
        if (scale_bytes == 0) return;
        if (scale_bytes % layout::kBulkAlign == 0) {
            char* to = p_.row_scales + int64_t(header.target[lane]) * scale_bytes;
            if (has_row) ptx::bulk_store(to, trailer, scale_bytes);
            return;
        }
        for (int i = 0; i < header.num_targets; ++i) {
            char* to = p_.row_scales + int64_t(header.target[i]) * scale_bytes;
            for (int b = lane; b < scale_bytes; b += kWarp) to[b] = trailer[b];
        }
    }

    template <int kRead, int kWritten>
    __device__ void settle() {
        ptx::bulk_wait_read<kRead>();
        __syncwarp();
        for (; num_freed_ < num_stored_ - kRead; ++num_freed_) {
            if (lane_id() == 0) smem_.slots.freed(oldest_);
            if (++oldest_ == slots_.size()) oldest_ = 0;
        }
        const uint32_t written = ends_parcel_ >> kWritten;
        if (written == 0) return;  // for waiting invalidates the L1 cache
        ptx::bulk_wait_written<kWritten>();
        ends_parcel_ &= (1u << kWritten) - 1;
        __threadfence_block();
        if (lane_id() == 0) atomicAdd(&smem_.parcels_stored, __popc(written));
    }

    const DispatchParams& p_;
    const Slots& slots_;
    Smem& smem_;
    Turn turn_;
    int oldest_ = 0;  // slot that is not freed
    int num_stored_ = 0, num_freed_ = 0;
    uint32_t ends_parcel_ = 0;  // bit i: the slot stored i before the newest, until it is written
};
static_assert(kSlotsWritten < 32);

// The block's parcels in turn, as soon as their rows and trailers are written: as many at once as
// there are, because a fence for the whole system takes longer than storing a parcel.
__device__ void announce_parcels(const DispatchParams& p, const Smem& smem, uint64_t epoch) {
    const auto& b = p.context.buffer;
    const int num_parcels = layout::ceil_div(p.num_tokens, kParcelTokens);
    const bool has_trailers = p.record.trailer_bytes() > 0;
    const auto* stored = static_cast<const volatile uint32_t*>(&smem.parcels_stored);
    const auto* trailers = static_cast<const volatile uint32_t*>(&smem.trailers_written);
    const uint64_t value = flag_value(epoch, p.record.signature());
    int announced = 0;
    auto parcel = [&](int i) { return int(blockIdx.x) + i * int(gridDim.x); };
    while (parcel(announced) < num_parcels) {
        int ready = *stored;
        if (has_trailers) ready = min(ready, int(*trailers) / kWriters);
        ready = __shfl_sync(kAllLanes, ready, 0);
        if (ready == announced) continue;
        ptx::fence_proxy_async();
        ptx::fence_system();
        const int num_flags = (ready - announced) * b.num_ranks;
        for (int i = lane_id(); i < num_flags; i += kWarp) {
            const int peer = i % b.num_ranks, at = parcel(announced + i / b.num_ranks);
            auto* flag = reinterpret_cast<uint64_t*>(p.context.peers.base[peer] +
                                                     b.flag(Phase::kDispatch, p.context.rank, at));
            ptx::store_relaxed(flag, value);
        }
        announced = ready;
        __syncwarp();
    }
}

// A batch is handed on when all its copies have been announced by their sources.
__device__ void walk_copies(const DispatchParams& p, const layout::HandleView& handle, Smem& smem,
                            uint64_t epoch) {
    const auto& b = p.context.buffer;
    const int rank = p.context.rank;
    const bool awaits_own = p.record.trailer_bytes() > 0;
    CopyWalk walk(handle, b.num_ranks, rank, &p.context.watch.state->steps_taken, gridDim.x);
    Turn turn;
    bool good = true;
    for (bool more = true; more; turn.advance(CopyBatches::kSize)) {
        CopyBatch& batch = smem.copies.batch[turn.at];
        smem.copies.handover.await_free(turn);
        walk.next(batch);
        const Stopwatch waiting(p.context.trace);
        if (lane_id() < batch.num_copies) {
            const int source = batch.source[lane_id()];
            const int parcel = batch.copy[lane_id()].token / kParcelTokens;
            auto* flag = reinterpret_cast<const uint64_t*>(
                p.context.peers.base[rank] + b.flag(Phase::kDispatch, source, parcel));
            if (source != rank || awaits_own) {
                good = wait_flag(flag, epoch, p.record.signature(), p.context.watch,
                                 Phase::kDispatch, source, parcel);
            }
            ptx::fence_proxy_async();
        }
        good = __all_sync(kAllLanes, good);
        if (!good) smem.failed = true;
        more = good && batch.num_copies > 0;
        __syncwarp();
        if (lane_id() == 0) {
            if (more) waiting.note(Span::kAwaitRows, epoch);
            if (!more) batch.num_copies = 0;
            smem.copies.handover.filled(turn);
        }
        __syncwarp();
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

__device__ void zero_row(const DispatchParams& p, int64_t row) {
    auto* to = reinterpret_cast<uint4*>(p.rows + row * p.record.row_bytes);
    for (int i = lane_id(); i < p.record.row_bytes / 16; i += kWarp) to[i] = uint4{};
    char* scales = p.row_scales + row * p.record.scale_bytes;
    for (int i = lane_id(); i < p.record.scale_bytes; i += kWarp) scales[i] = 0;
    if (lane_id() == 0 && p.record.weight_bytes > 0) p.row_weights[row] = 0.f;
}

// The end of each expert's group, and the tail after the last.
__device__ void zero_padding(const DispatchParams& p, const layout::HandleView& handle,
                             int writer) {
    const int experts = p.context.buffer.num_local_experts;
    const int first = blockIdx.x * kWriters + writer, step = gridDim.x * kWriters;
    for (int e = 0; e <= experts; ++e) {
        int64_t begin = handle.offsets[e] + (e < experts ? handle.counts[e] : 0);
        int64_t end = e < experts ? handle.offsets[e + 1] : p.num_rows;
        for (int64_t row = begin + first; row < end; row += step) zero_row(p, row);
    }
}

__device__ void write(const DispatchParams& p, const layout::HandleView& handle, Smem& smem,
                      int writer, uint64_t epoch) {
    if (p.publishes && p.record.trailer_bytes() > 0) {
        const int parcels = layout::ceil_div(p.num_tokens, kParcelTokens);
        for (int parcel = blockIdx.x; parcel < parcels; parcel += gridDim.x) {
            write_trailers(p, handle, writer, parcel, epoch);
            __threadfence_block();  // the herald's fence is for all
            __syncwarp();
            if (lane_id() == 0) atomicAdd(&smem.trailers_written, 1u);
        }
    }
    if (!p.pulls || !handle.header[layout::HandleLayout::kMayHavePadding]) return;
    const Stopwatch zeroing(p.context.trace);
    zero_padding(p, handle, writer);
    if (writer == 0 && lane_id() == 0) zeroing.note(Span::kZeroPadding, epoch);
}

__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    const Slots slots(dynamic_smem, p.ring);
    const Watch& watch = p.context.watch;
    if (threadIdx.x == 0) {
        smem.slots.init(slots.size(), 1);
        smem.copies.handover.init(CopyBatches::kSize, 1);
        smem.parcels_stored = smem.trailers_written = 0;
        smem.failed = has_fault(watch.state);
    }
    __syncthreads();
    if (smem.failed) return;
    const uint64_t epoch = current_epoch(watch.state, Phase::kDispatch);
    const layout::HandleView handle(p.words, p.context.handle);

    const int role = warp_id();
    if (role == kLoader) {
        Loader(p, handle, slots, smem, epoch).run(p.context.trace);
    } else if (role == kStorer) {
        Storer(p, slots, smem).run();
    } else if (role == kWalker) {
        if (p.pulls) walk_copies(p, handle, smem, epoch);
    } else if (role == kHerald) {
        if (publishes(p)) announce_parcels(p, smem, epoch);
    } else {
        write(p, handle, smem, role - kFirstWriter, epoch);
    }
    __syncthreads();
    if (p.pulls && !smem.failed && is_last_block(watch.state) && threadIdx.x == 0) {
        close_call(watch.state, Phase::kDispatch, epoch);
    }
}

}  // namespace

void launch_dispatch(const DispatchParams& p, cudaStream_t stream) {
    launch(dispatch, p, p.num_blocks, kThreads, layout::dynamic_smem_bytes(p.ring, 1), stream);
}

}  // namespace hybrid_ep::kernels
