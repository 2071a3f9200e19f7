// What the host runtime launches. Parameters travel by value; sizes are run-time values. The
// launch_* are those of one node; of the kernels here assign_rows alone serves several nodes too.
#pragma once

#include <cuda_runtime.h>

#include "kernels/verbs.h"
#include "layout/context.h"
#include "layout/record_layout.h"
#include "layout/ring_shape.h"
#include "network/context.h"

namespace hybrid_ep::kernels {

struct PublishRoutingParams {
    Context context;
    Choices choices;
    int num_blocks;
    int32_t* words;  // the layout being made
};
void launch_publish_routing(const PublishRoutingParams& p, cudaStream_t stream);

struct AssignRowsParams {
    Context context;
    int num_publish_blocks;
    int align;
    int64_t max_rows;  // < 0: no bound
    NewLayout layout;
    Mail* mail;  // null: the host does not wait
    uint64_t ticket;
};
void launch_assign_rows(const AssignRowsParams& p, cudaStream_t stream);

// How rows are published: those of the tokens before `begin` by SMs, the others by the copy engine.
// Those before token end[i] are in the outbox once flag i of DeviceState::rows_copied is that of
// the call. Begin and ends are multiples of a parcel, or the number of tokens.
struct EngineSteps {
    static constexpr int kMost = DeviceState::kEngineSteps;
    int begin = 0;
    int count = 0;
    int end[kMost] = {};
};

// One launch, or two: the first publishes parcels [first_parcel, end_parcel), the second the rest
// and pulls.
struct DispatchParams {
    Context context;
    layout::RecordLayout record;
    int first_parcel, end_parcel;
    bool pulls;
    EngineSteps copied;
    bool behind_routing;  // the kernel before is assign_rows, of the same call
    Sent sent;
    Received received;  // where it pulls
    int first_block, num_blocks;
    layout::SliceLayout slices;
    layout::RingShape ring;
};
void launch_dispatch(const DispatchParams& p, cudaStream_t stream);

// In one launch; a slice is a row, the ring leaves room for what scales (layout::scale_ring).
struct CombineBackwardParams {
    DispatchParams dispatch;
    Weighted weighted;
};
void launch_combine_backward(const CombineBackwardParams& p, cudaStream_t stream);

struct CombineParams {
    Context context;
    Summed summed;
    int num_blocks;
    layout::SliceLayout slices;
    layout::RingShape ring;  // of layout::kSumRings
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

// Which kernels a runtime launches: those of one node, or of several nodes over a network
// (several_nodes.h), which need the whole context.
struct Launchers {
    template <typename Params>
    using With = void (*)(const NodesContext& context, const Params& p, cudaStream_t stream);

    With<PublishRoutingParams> publish_routing;
    With<AssignRowsParams> assign_rows;
    With<DispatchParams> dispatch;
    With<CombineBackwardParams> combine_backward;
    With<CombineParams> combine;
    With<uint64_t> give_up;  // the reason, for rail peers; null where there are none
    void (*copy_peer)(const CopyPeerParams& p, cudaStream_t stream);  // or null
    bool routing_ends_in_assign_rows;  // so a dispatch may be behind_routing
    int least_dispatch_blocks, least_combine_blocks;
    int num_scalers;  // warps of a block of combine_backward
};

}  // namespace hybrid_ep::kernels
