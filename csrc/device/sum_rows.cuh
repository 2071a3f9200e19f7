// Sums of rows: the walk says which rows and where the sum goes.
//
//   own rows, sums of others --TMA loads--> slots --add in fp32, in order--> registers
//   registers --round, ordinary stores--> where the sum goes; the herald tells that it has come
//
// A slot holds a slice of one term, the adders of a ring keep the slice's sum in registers. A sum
// starts with its first term (0 + x is not always x), rounds each product before adding it, and is
// rounded once at the end, as the torch backend does. Sums leave by ordinary stores: a bulk store
// over NVLink would hold up the bulk loads behind it.
#pragma once

#include "device/flag.cuh"
#include "device/ring.cuh"
#include "device/vector.cuh"

namespace hybrid_ep::device {

constexpr int kAdderWarps = 7;  // of a ring
constexpr int kAdders = kAdderWarps * kWarp;
constexpr int kVectors = layout::kMostSumBytes / (kAdders * 16);  // of 16 bytes, an adder's share

// What is added, and where the sum goes. My own rows make a sum of their own, zero if there are
// none. If there are sums of other ranks, it is rounded and added among them.
struct Sum {
    char* to;            // null: there is no more
    uint64_t note;       // for the herald, which flag to set when it is stored; 0: none
    int num_rows;        // mine
    int num_sums;        // of other ranks
    int num_before_own;  // so many of these come before mine; -1: it is not added
};

// Behind a slot: the same for all terms of a sum, but for the weight.
struct TermHeader {
    float weight;
    int bytes;
    Sum sum;  // of the slice
};
static_assert(sizeof(TermHeader) == layout::kSumHeaderBytes);

// A ring's part of shared memory.
struct SumSmem {
    SlotHandover slots;
    // Sums with notes, from adders to herald. As many as there are slots: a warp of adders may be
    // so many sums ahead of another, and with more of them pushers fill the link's queues.
    SlotHandover stored;
    uint64_t note[layout::kMostSlots];  // 0: there is no more

    // One thread, before a barrier of the block.
    __device__ void init(int num_slots) {
        slots.init(num_slots, kAdderWarps);
        stored.init(num_slots, 1, kAdderWarps);
    }
};

// One warp: loads the terms of sum after sum. `Walk::next` is called by the whole warp and fills
// in the sum and, for lane i, where its i-th term is, with which weight.
template <typename Walk>
__device__ __forceinline__ void load_terms(Walk& walk, const Slots& slots, SumSmem& smem,
                                           const layout::SliceLayout& slices, int row_bytes) {
    Turn turn;
    TermHeader header;
    const char* term;
    while (walk.next(header.sum, term, header.weight)) {
        const Sum sum = header.sum;
        const int num_terms = sum.num_rows + sum.num_sums, num_slots = max(num_terms, 1);
        for (int slice = 0; slice < slices.num_slices; ++slice) {
            const int offset = slice * slices.slice_bytes;
            header.bytes = min(slices.slice_bytes, row_bytes - offset);
            header.sum.to = sum.to + offset;
            header.sum.note = slice + 1 == slices.num_slices ? sum.note : 0;
            for (int i = 0; i < num_slots; ++i) {
                smem.slots.await_free(turn);
                if (lane_id() == i) {
                    slots.header<TermHeader>(turn.at) = header;
                    smem.slots.filled_by(turn, num_terms > 0 ? header.bytes : 0);
                    if (num_terms > 0) {
                        ptx::bulk_load(slots.bytes(turn.at), term + offset, header.bytes,
                                       smem.slots.barrier(turn));
                    }
                }
                turn.advance(slots.size());
            }
        }
    }
    smem.slots.await_free(turn);
    if (lane_id() == 0) {
        slots.header<TermHeader>(turn.at).sum.to = nullptr;
        smem.slots.filled(turn);
    }
}

// The adders of a ring, kAdderWarps of them.
template <typename T, bool kWeighted>
class Adder {
  public:
    __device__ Adder(const Slots& slots, SumSmem& smem, int adder)
        : slots_(slots), smem_(smem), adder_(adder) {}

    __device__ void run() {
        while (true) {
            smem_.slots.await_filled(turn_);
            const Sum& sum = header().sum;
            if (sum.to == nullptr) break;
            bytes_ = header().bytes;
            const int num_rows = sum.num_rows, num_sums = sum.num_sums, place = sum.num_before_own;
            terms_left_ = num_rows + num_sums;
            if (num_rows == 0) begin_with_zero();
            if (num_rows > 0) begin_with_term();
            for (int i = 1; i < num_rows; ++i) add_term();
            if (num_sums > 0) add_sums(num_sums, place);
            finish();
        }
        hand_on(0);
    }

  private:
    using V = Vector<T>;

    __device__ __forceinline__ void begin_with_zero() {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int k = 0; k < V::kSize; ++k) sum_[v][k] = 0.f;
        }
    }

    __device__ __forceinline__ void begin_with_term() {
        load();
        begin_with(term_, weight());
        end_term();
    }

    // The next one, which has landed.
    __device__ __forceinline__ void add_term() {
        load();
        add(term_, weight());
        end_term();
    }

    // Sums of two ranks may be added either way round.
    __device__ __forceinline__ void add_sums(int num_sums, int num_before_own) {
        uint4 own[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) own[v] = V::pack(sum_[v]);
        const bool own_first = num_before_own == 0 || num_before_own == 1;
        if (own_first) begin_with(own, 1.f);
        if (!own_first) begin_with_term();
        for (int i = own_first ? 0 : 1; i < num_sums; ++i) {
            if (!own_first && i == num_before_own) add(own, 1.f);
            add_term();
        }
        if (!own_first && num_sums == num_before_own) add(own, 1.f);
    }

    // The slot of the last one is kept, for its header.
    __device__ __forceinline__ void end_term() {
        if (--terms_left_ == 0) return;
        free_slot();
        turn_.advance(slots_.size());
        smem_.slots.await_filled(turn_);
    }

    __device__ __forceinline__ void load() {
        const char* mine = slots_.bytes(turn_.at) + adder_ * 16;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (at(v) < bytes_) {
                term_[v] = *reinterpret_cast<const uint4*>(mine + v * (kAdders * 16));
            }
        }
    }

    // An adder beyond the slice's end adds what was there before to sums that are not stored: that
    // is cheaper than a branch that divides a warp.
    __device__ __forceinline__ void add(const uint4 (&what)[kVectors], float weight) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (v * kAdders * 16 >= bytes_) break;
            float term[V::kSize];
            unpack(what[v], weight, term);
#pragma unroll
            for (int k = 0; k < V::kSize; ++k) sum_[v][k] = __fadd_rn(sum_[v][k], term[k]);
        }
    }
    __device__ __forceinline__ void begin_with(const uint4 (&what)[kVectors], float weight) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) unpack(what[v], weight, sum_[v]);
    }
    __device__ __forceinline__ void unpack(const uint4& what, float weight, float* term) const {
        V::unpack(what, term);
#pragma unroll
        for (int k = 0; k < V::kSize; ++k) {
            if constexpr (kWeighted) term[k] = __fmul_rn(weight, term[k]);
        }
    }

    __device__ __forceinline__ void finish() {
        char* to = header().sum.to;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (at(v) < bytes_) *reinterpret_cast<uint4*>(to + at(v)) = V::pack(sum_[v]);
        }
        if (header().sum.note != 0) hand_on(header().sum.note);
        free_slot();
        turn_.advance(slots_.size());
    }

    __device__ __forceinline__ void hand_on(uint64_t note) {
        if (adder_ == 0) {
            smem_.stored.await_free(stored_);
            smem_.note[stored_.at] = note;
        }
        __syncwarp();
        if (lane_id() == 0) smem_.stored.filled(stored_);
        stored_.advance(slots_.size());
    }

    __device__ __forceinline__ void free_slot() {
        __syncwarp();
        if (lane_id() == 0) smem_.slots.freed(turn_.at);
    }

    __device__ __forceinline__ float weight() const { return kWeighted ? header().weight : 1.f; }
    __device__ __forceinline__ const TermHeader& header() const {
        return slots_.header<TermHeader>(turn_.at);
    }
    __device__ __forceinline__ int at(int v) const { return (v * kAdders + adder_) * 16; }

    const Slots& slots_;
    SumSmem& smem_;
    int adder_;
    Turn turn_, stored_;
    int bytes_ = 0, terms_left_ = 0;
    uint4 term_[kVectors]{};
    float sum_[kVectors][V::kSize];
};

// One warp, the herald: `tell(note)` for the sums that are stored, a lane each (0 in the others),
// as many at once as there are, since a fence for the whole system takes longer than a sum. It
// sleeps while there is none: polling would take the adders' turns at shared memory. Returns when
// it told of the last, by the GPU's timer; 0: there was none.
template <typename Tell>
__device__ inline uint64_t announce_sums(SumSmem& smem, int num_slots, Tell tell) {
    uint64_t last_ns = 0;
    int announced = 0;
    for (bool is_end = false; !is_end;) {
        smem.stored.await_filled(Turn::of(announced, num_slots));
        const int stored = smem.stored.num_filled(announced, num_slots);
        ptx::fence_system();
        uint64_t note = 0;
        if (lane_id() < stored) {
            note = smem.note[(announced + lane_id()) % num_slots];
            is_end = note == 0;
        }
        tell(note);
        if (lane_id() < stored) smem.stored.freed((announced + lane_id()) % num_slots);
        announced += stored;
        if (__any_sync(kAllLanes, note != 0)) last_ns = ptx::global_timer_ns();
        is_end = __any_sync(kAllLanes, is_end);
    }
    return last_ns;
}

}  // namespace hybrid_ep::device
