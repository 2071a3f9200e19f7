// Publishing, a part of dispatch: my tokens become readable for my peers.
//
//   x[t], scales, weights --loads and stores--> outbox record [row | scales | weights]   writers
//                                       parcel complete --> a flag in every peer          herald
//
// Parcels are taken by a counter, not dealt to blocks: the blocks that are resident publish all of
// them, so no rank waits for blocks that find no SM.
// Of tokens whose rows the copy engine publishes, writers have the scales and weights left to do,
// and the herald waits for both.
#pragma once

#include "device/flag.cuh"
#include "device/ring.cuh"
#include "device/trace.cuh"
#include "device/warp.cuh"
#include "kernels/kernels.h"

namespace hybrid_ep::kernels {

using namespace device;
using layout::kParcelTokens;

constexpr int kWriters = 4;  // more would take the SM's stores away from pulling

struct PublishSmem {
    static constexpr int kParcels = 31, kEnd = -1;

    Handover<kParcels> parcels;  // of this block, from writers to herald
    uint64_t taken[kParcels];    // barriers: `parcel` says which it is
    int parcel[kParcels];        // kEnd: there is no more

    // One thread, before a barrier of the block.
    __device__ void init(int num_writers) {
        for (int i = 0; i < kParcels; ++i) ptx::mbarrier_init(&taken[i], 1);
        parcels.init(kParcels, 1, num_writers);
    }
};

// A rank by itself has no peers to publish for, but its trailers go through the outbox as well.
__device__ __forceinline__ bool publishes(const DispatchParams& p) {
    return p.context.buffer.num_ranks > 1 || p.record.trailer_bytes() > 0;
}

// Where the host had no memory for the rows, the call is made without any: the peers need not know.
__device__ __forceinline__ bool has_rows(const DispatchParams& p) {
    return p.received.num_rows > 0;
}

// In the memory of a rank of my node, named by its local rank.
__device__ inline uint64_t* flag_in(const DispatchParams& p, int peer, int source, int channel) {
    return reinterpret_cast<uint64_t*>(p.context.peers.base[peer] +
                                       p.context.buffer.flag(Phase::kDispatch, source, channel));
}

// The whole warp. A thread has so many vectors of 16 bytes under way.
template <int kVectorsAtOnce>
__device__ inline void copy_row(char* to, const char* from, int bytes) {
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

// The rows of a parcel that are those of one of the writers.
template <int kVectorsAtOnce>
__device__ inline void write_rows(const DispatchParams& p, const layout::HandleView& handle,
                                  int writer, int num_writers, int parcel, uint64_t epoch) {
    const int64_t token = int64_t(parcel) * kParcelTokens + lane_id();
    const bool travels = lane_id() < kParcelTokens && token < p.sent.num_tokens &&
                         __ldg(&handle.num_others[token]) > 0;
    uint32_t left = __ballot_sync(kAllLanes, travels);
    for (int turn = 0; left != 0; ++turn, left &= left - 1) {
        if (turn % num_writers != writer) continue;
        const int64_t mine = int64_t(parcel) * kParcelTokens + __ffs(left) - 1;
        copy_row<kVectorsAtOnce>(p.context.mine() + p.context.buffer.record(epoch, mine),
                                 p.sent.x + mine * p.sent.x_stride, p.record.row_bytes);
    }
}

// The writers' part of a parcel's trailers: scales as they are; weights by place (the order of the
// token's distinct experts), those of repeated experts added, as the peers' rows refer to them.
__device__ inline void write_trailers(const DispatchParams& p, const layout::HandleView& handle,
                                      int writer, int num_writers, int parcel, uint64_t epoch) {
    const int64_t first = int64_t(parcel) * kParcelTokens;
    const int count = int(min(int64_t(kParcelTokens), p.sent.num_tokens - first));
    const int64_t record_bytes = p.context.buffer.record_bytes;
    char* trailers =
        p.context.mine() + p.context.buffer.record(epoch, first) + p.record.scales_offset();

    const bool wide = p.record.scale_bytes % 4 == 0 && p.sent.scales_stride % 4 == 0;
    const int step = wide ? 4 : 1, units = p.record.scale_bytes / step;
#pragma unroll 4
    for (int i = writer * kWarp + lane_id(); i < count * units; i += num_writers * kWarp) {
        const int in_parcel = i / units, at = (i - in_parcel * units) * step;
        const char* from = p.sent.scales + (first + in_parcel) * p.sent.scales_stride + at;
        char* to = trailers + in_parcel * record_bytes + at;
        if (wide) {
            *reinterpret_cast<int*>(to) = __ldg(reinterpret_cast<const int*>(from));
        } else {
            *to = __ldg(from);
        }
    }
    if (p.record.weight_bytes == 0) return;

    const int topk = p.context.buffer.topk, per_step = kWarp / topk;
    const int group = lane_id() / topk, k = lane_id() % topk;
    for (int base = writer * per_step; base < count; base += num_writers * per_step) {
        const int in_parcel = base + group;
        const int64_t token = first + in_parcel;
        const bool active = group < per_step && in_parcel < count;
        const float weight =
            active ? __ldg(&p.sent.weights[token * p.sent.weights_stride + k]) : 0.f;
        const int place = active ? handle.places[token * topk + k] : -1;
        float sum = 0.f;
        for (int j = 0; j < topk; ++j) {
            const int lane = min(group * topk + j, kWarp - 1);
            const float other = __shfl_sync(kAllLanes, weight, lane);
            if (__shfl_sync(kAllLanes, place, lane) == k) sum = __fadd_rn(sum, other);
        }
        auto* weights =
            reinterpret_cast<float*>(trailers + in_parcel * record_bytes +
                                     p.record.weights_offset() - p.record.scales_offset());
        if (active) weights[k] = sum;
    }
}

// One thread: the number of the next parcel.
__device__ __forceinline__ int ask_for_parcel(const DispatchParams& p) {
    return p.first_parcel +
           int(atomicAdd(&p.context.watch.state->parcels_taken[p.pulls ? 1 : 0], 1u));
}

// The first of the writers takes parcels for all of them. It asks for the next one before this one
// is written, and for the first one before anything else: the counter answers after a microsecond.
class ParcelTaker {
  public:
    __device__ ParcelTaker(const DispatchParams& p, PublishSmem& smem, int writer, int first)
        : p_(p), smem_(smem), takes_(writer == 0 && lane_id() == 0), next_(first) {}

    // The whole warp: which parcel the turn has, or kEnd.
    __device__ int take(const Turn& turn) {
        if (takes_) {
            smem_.parcels.await_free(turn);
            smem_.parcel[turn.at] = next_ < p_.end_parcel ? next_ : PublishSmem::kEnd;
            ptx::mbarrier_arrive(&smem_.taken[turn.at]);
            next_ = ask_for_parcel(p_);
        }
        ptx::mbarrier_wait(&smem_.taken[turn.at], turn.parity);
        __syncwarp();
        return smem_.parcel[turn.at];
    }

  private:
    const DispatchParams& p_;
    PublishSmem& smem_;
    bool takes_;
    int next_;
};

template <int kVectorsAtOnce>
__device__ inline void write_parcels(const DispatchParams& p, const layout::HandleView& handle,
                                     PublishSmem& smem, int writer, int num_writers, uint64_t epoch,
                                     int first) {
    ParcelTaker taker(p, smem, writer, first);
    for (Turn turn;; turn.advance(PublishSmem::kParcels)) {
        const int parcel = taker.take(turn);
        if (parcel == PublishSmem::kEnd) break;
        if (parcel * kParcelTokens < p.copied.begin)
            write_rows<kVectorsAtOnce>(p, handle, writer, num_writers, parcel, epoch);
        write_trailers(p, handle, writer, num_writers, parcel, epoch);
        __syncwarp();
        if (lane_id() == 0) smem.parcels.filled(turn);
    }
}

// How far the copy engine is. The whole warp.
class CopiedRows {
  public:
    __device__ CopiedRows(const DispatchParams& p, uint64_t epoch) : p_(p), epoch_(epoch) {}

    // Until the rows of `parcel` are in the outbox. False: give up.
    __device__ bool await(int parcel) {
        const auto& watch = p_.context.watch;
        for (; parcel >= end_parcel(); ++steps_) {
            if (!wait_flag(&watch.state->rows_copied[steps_], epoch_, kCopiedSignature, watch,
                           Phase::kDispatch, p_.context.rank, parcel)) {
                return false;
            }
        }
        return true;
    }
    // The rows of the parcels before it are there.
    __device__ int end_parcel() const {
        if (steps_ == p_.copied.count) return p_.end_parcel;
        return (steps_ == 0 ? p_.copied.begin : p_.copied.end[steps_ - 1]) / kParcelTokens;
    }

  private:
    const DispatchParams& p_;
    uint64_t epoch_;
    int steps_ = 0;
};

// The block's parcels in turn, as many at once as are written: a fence for the whole system takes
// longer than writing a parcel. It sleeps while there is none.
__device__ inline void announce_parcels(const DispatchParams& p, PublishSmem& smem,
                                        uint64_t epoch) {
    const Stopwatch publishing(p.context.trace);
    const int peers = p.context.num_peers;
    const uint64_t value = flag_value(epoch, p.record.signature());
    CopiedRows copied(p, epoch);
    for (int announced = 0;;) {
        auto parcel = [&](int i) { return smem.parcel[(announced + i) % PublishSmem::kParcels]; };
        const Turn turn = Turn::of(announced, PublishSmem::kParcels);
        ptx::mbarrier_wait(&smem.taken[turn.at], turn.parity);  // which one it is
        if (parcel(0) == PublishSmem::kEnd) break;
        smem.parcels.await_filled(turn);            // what the writers write of it
        const bool good = copied.await(parcel(0));  // and the copy engine; else the call fails
        const int filled = smem.parcels.num_filled(announced, PublishSmem::kParcels);
        int ready = 1;
        while (ready < filled && (!good || parcel(ready) < copied.end_parcel())) ++ready;
        ptx::fence_system();
        for (int i = lane_id(); i < ready * peers; i += kWarp) {
            const int peer = i % peers, at = parcel(i / peers);
            if (good) ptx::store_relaxed(flag_in(p, peer, p.context.rank, at), value);
        }
        __syncwarp();
        if (lane_id() < ready) smem.parcels.freed((announced + lane_id()) % PublishSmem::kParcels);
        announced += ready;
    }
    if (lane_id() == 0) publishing.note(Span::kPublishRows, epoch);
}

}  // namespace hybrid_ep::kernels
