// What the host runtime launches. Parameters travel by value; sizes are run-time values.
#pragma once

#include <cuda_runtime.h>

#include "layout/buffer_layout.h"
#include "layout/handle_layout.h"
#include "layout/record_layout.h"
#include "layout/ring_shape.h"
#include "runtime_state.h"

namespace hybrid_ep::kernels {

// What every kernel knows: where everything is and how long to wait.
struct Context {
    Peers peers;
    int rank;
    layout::BufferLayout buffer;
    layout::HandleLayout handle;
    Watch watch;
    Trace trace;

    // Where ranks of several nodes are more than a node has, of the peers mine alone is set.
    HYBRID_EP_HD char*& mine() { return peers.base[rank % layout::kMaxRanks]; }
    HYBRID_EP_HD char* mine() const { return peers.base[rank % layout::kMaxRanks]; }
};

struct PublishRoutingParams {
    Context context;
    const void* topk_idx;  // [T, topk] of idx_bytes each, rows idx_stride elements apart
    int idx_bytes;
    int64_t idx_stride;
    int num_tokens;
    int num_blocks;
    int32_t* words;  // the handle being made
};
void launch_publish_routing(const PublishRoutingParams& p, cudaStream_t stream);

struct AssignRowsParams {
    Context context;
    int num_publish_blocks;
    int align;
    int64_t max_rows;  // < 0: no bound
    int32_t* words;
    int32_t *counts, *offsets, *required_rows;  // copies of the handle's, for Python
    Mail* mail;                                 // null: nobody waits
    uint64_t ticket;
};
void launch_assign_rows(const AssignRowsParams& p, cudaStream_t stream);

// What a dispatch sends: a row for each token, scales and weights if they are not null.
struct Tokens {
    const char *x, *scales;                           // [T, row_bytes], [T, scale_bytes]
    const float* weights;                             // [T, topk]
    int64_t x_stride, scales_stride, weights_stride;  // bytes, bytes, elements
    int count;
};

// What it brings: a row for each copy of a token and expert, and padding.
struct ExpertRows {
    char *x, *scales;  // [M, row_bytes], [M, scale_bytes]
    float* weights;    // [M]
    int64_t count;
};

// How rows are published: those of the tokens before `begin` by SMs, the others by the copy engine.
// Those before token end[i] are in the outbox once flag i of DeviceState::rows_copied is that of
// the call. Begin and ends are multiples of a parcel, or the number of tokens.
struct CopySteps {
    static constexpr int kMost = DeviceState::kCopySteps;
    int begin;
    int count;
    int end[kMost];
};

// One launch, or two: the first publishes parcels [first_parcel, end_parcel), the second the rest
// and pulls.
struct DispatchParams {
    Context context;
    layout::RecordLayout record;
    int first_parcel, end_parcel;
    bool pulls;
    CopySteps copied;
    bool behind_routing;  // the kernel before is assign_rows, of the same call
    Tokens tokens;
    ExpertRows rows;
    int num_blocks;
    layout::SliceLayout slices;
    layout::RingShape ring;
    int32_t* words;
};
void launch_dispatch(const DispatchParams& p, cudaStream_t stream);

enum class SumType : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// What a combine reads and what it writes.
struct CombineIo {
    SumType type;
    int row_bytes;
    const char* rows;      // [M, row_bytes]
    const float* weights;  // [M] or null
    const float* values;   // [M] or null
    char* y;               // [T, row_bytes]
    float* home_values;    // [T, topk] or null, as values
    int num_tokens;
};

struct CombineParams {
    Context context;
    CombineIo io;
    int num_blocks;
    layout::SliceLayout slices;
    layout::RingShape ring;  // of layout::kSumRings
    int32_t* words;
};
void launch_combine(const CombineParams& p, cudaStream_t stream);

// For the bench alone: bytes from one rank's memory to another's.
struct CopyPeerParams {
    const char* from;
    char* to;
    int64_t num_bytes;  // a multiple of 16
    int num_blocks;
    layout::RingShape ring;
};
void launch_copy_peer(const CopyPeerParams& p, cudaStream_t stream);

}  // namespace hybrid_ep::kernels
