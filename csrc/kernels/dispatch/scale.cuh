// Scaling, in place of storing: the gradients of a weighted combine, as a part of dispatch.
//
//   job: gradient of a token's sum in the slot --times the row's weight--> gradients of its rows
//   job: the same . the experts' rows --dot products, in fp32--> gradients of the weights
//
// The rows of a copy are dealt to warps, one warp per row, so a dot product needs no other warp.
// Its order is a matter of the row alone: a row is cut into strips of 16 bytes for each lane, and
// products of the same column are added strip by strip; then the columns of a lane, then the lanes,
// each time the first half to the second. The torch backend adds in the same order.
#pragma once

#include "device/vector.cuh"
#include "kernels/dispatch/padding.cuh"
#include "kernels/dispatch/pull.cuh"

namespace hybrid_ep::kernels {

// A row of the experts on its way through stages of shared memory, which belong to one warp: some
// pieces are under way while one is read.
class RowReader {
  public:
    static constexpr int kStages = layout::kScaleStages, kStageBytes = layout::kScaleStageBytes;

    __device__ RowReader(char* smem)
        : landed_(reinterpret_cast<uint64_t*>(smem)), stages_(smem + 128) {
        if (lane_id() == 0) {
            for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&landed_[i], 1);
            ptx::fence_mbarrier_init();
        }
        __syncwarp();
    }

    // The row before has been read.
    __device__ void begin(const char* row, int bytes) {
        from_ = row;
        bytes_left_ = bytes;
        for (int i = 0; i < kStages; ++i) start_piece();
    }
    // The next piece, which has landed.
    __device__ const char* next() const {
        ptx::mbarrier_wait(&landed_[reading_.at], reading_.parity);
        return stages_ + reading_.at * kStageBytes;
    }
    // It has been read.
    __device__ void advance() {
        reading_.advance(kStages);
        __syncwarp();
        start_piece();
    }

  private:
    __device__ void start_piece() {
        const int bytes = min(bytes_left_, kStageBytes);
        if (bytes <= 0) return;
        if (lane_id() == 0) {
            ptx::mbarrier_expect(&landed_[starting_], bytes);
            ptx::bulk_load(stages_ + starting_ * kStageBytes, from_, bytes, &landed_[starting_]);
        }
        starting_ = starting_ + 1 == kStages ? 0 : starting_ + 1;
        from_ += bytes;
        bytes_left_ -= bytes;
    }

    uint64_t* landed_;
    char* stages_;
    const char* from_ = nullptr;
    int bytes_left_ = 0, starting_ = 0;
    Turn reading_;
};

// The whole warp: the sum of all columns.
template <int kColumns>
__device__ __forceinline__ float add_by_halves(float (&columns)[kColumns]) {
#pragma unroll
    for (int half = kColumns / 2; half > 0; half /= 2) {
#pragma unroll
        for (int k = 0; k < half; ++k) columns[k] = __fadd_rn(columns[k], columns[k + half]);
    }
    float sum = columns[0];
#pragma unroll
    for (int half = kWarp / 2; half > 0; half /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, half));
    }
    return sum;
}

// One of kScalers warps.
template <typename T, int kScalers>
class Scaler {
  public:
    __device__ Scaler(const DispatchParams& p, const Weighted& weighted, const Slots& slots,
                      PullSmem& smem, int nth)
        : p_(p),
          weighted_(weighted),
          slots_(slots),
          smem_(smem),
          reader_(stages_of(slots, nth)),
          next_(nth) {}

    // A job is a whole copy: slots hold rows of any width.
    __device__ void run() {
        for (Turn at, slot;; at.advance(kJobs), slot.advance(slots_.size())) {
            smem_.jobs.await_filled(at);
            const Job& job = smem_.job[at.at];
            const int num_rows = job.num_rows;
            if (num_rows == Job::kEnd) break;
            for (; next_ < num_rows; next_ += kScalers) scale(job.row[next_], slot);
            next_ -= num_rows;
            smem_.slots.await_filled(slot);
            __syncwarp();
            if (lane_id() == 0) {
                smem_.slots.freed(slot.at);
                smem_.jobs.freed(at.at);
            }
        }
    }

  private:
    using V = Vector<T>;
    static constexpr int kStripBytes = kWarp * 16;

    // Behind the ring.
    static __device__ char* stages_of(const Slots& slots, int nth) {
        return slots.end() + nth * layout::kScaleSmemBytes;
    }

    __device__ void scale(int row, const Turn& slot) {
        const int bytes = p_.record.row_bytes;
        const int64_t begin = int64_t(row) * bytes;
        reader_.begin(weighted_.rows + begin, bytes);
        const float weight = __ldg(&weighted_.weights[row]);
        char* grads = p_.received.rows + begin + lane_id() * 16;
        smem_.slots.await_filled(slot);
        const char* landed = slots_.bytes(slot.at) + lane_id() * 16;
        float columns[V::kSize] = {};
        for (int left = bytes; left > 0; left -= RowReader::kStageBytes) {
            const char* piece = reader_.next() + lane_id() * 16;
            if (left >= RowReader::kStageBytes) {
#pragma unroll V::kSize / 2
                for (int at = 0; at < RowReader::kStageBytes; at += kStripBytes) {
                    scale(piece + at, landed + at, grads + at, weight, columns);
                }
            } else {
                for (int at = 0; at + lane_id() * 16 < left; at += kStripBytes) {
                    scale(piece + at, landed + at, grads + at, weight, columns);
                }
            }
            reader_.advance();
            landed += RowReader::kStageBytes;
            grads += RowReader::kStageBytes;
        }
        const float dot = add_by_halves(columns);
        if (lane_id() == 0) p_.received.weights[row] = dot;
    }
    static __device__ __forceinline__ void scale(const char* from_row, const char* from_grad,
                                                 char* to, float weight,
                                                 float (&columns)[V::kSize]) {
        float row[V::kSize], grad[V::kSize];
        V::unpack(*reinterpret_cast<const uint4*>(from_row), row);
        V::unpack(*reinterpret_cast<const uint4*>(from_grad), grad);
#pragma unroll
        for (int k = 0; k < V::kSize; ++k) {
            columns[k] = __fadd_rn(columns[k], __fmul_rn(row[k], grad[k]));
            grad[k] = __fmul_rn(grad[k], weight);
        }
        __stcs(reinterpret_cast<uint4*>(to), V::pack(grad));
    }

    const DispatchParams& p_;
    const Weighted& weighted_;
    const Slots& slots_;
    PullSmem& smem_;
    RowReader reader_;
    int next_;  // of the rows of a copy, my next one: they are dealt on, copy after copy
};

// What becomes of rows that have landed (block.cuh): kWarps warps scale them.
template <typename T, int kScalers>
struct ScaleRows {
    static constexpr int kWarps = kScalers, kVectorsAtOnce = 4;

    const Weighted& weighted;

    __device__ void run(const DispatchParams& p, const Slots& slots, PullSmem& smem,
                        int nth) const {
        Scaler<T, kScalers>(p, weighted, slots, smem, nth).run();
    }
    // The gradients of the weights are padded as weights are.
    static __device__ layout::RecordLayout padded(const DispatchParams& p) {
        layout::RecordLayout record = p.record;
        record.weight_bytes = int(sizeof(float));
        return record;
    }
};

}  // namespace hybrid_ep::kernels
