// The few words that kernels and host share besides the symmetric memory.
#pragma once

#include "layout/bytes.h"

namespace hybrid_ep {

// Every peer's symmetric memory, mine included, mapped into this process.
struct Peers {
    char* base[layout::kMaxRanks];
};

enum class FaultKind : uint64_t {
    kNone = 0,
    kTimeout = 1,
    kOtherCall = 2,
    kBadExpert = 3,
    kPeerGaveUp = 4,
    kAwaitedInVain = 5,   // by another rank, which has told
    kTooManyExperts = 6,  // of a token of `peer`, `seen` of them: more than its top-k slots
};

// In mapped host memory. `kind` is written last.
struct Fault {
    uint64_t kind;
    int32_t phase, peer, channel, unused;
    uint64_t epoch, seen;
    uint64_t mine;  // kOtherCall: my announcement, `seen` is the peer's
};

// The offsets of the rows of an exact dispatch, the last of which is their number, on their way to
// the waiting host. In mapped host memory; `ticket` is written last.
struct Mail {
    uint64_t ticket;

    // [num_local_experts + 1], behind the ticket.
    HYBRID_EP_HD int32_t* offsets() { return reinterpret_cast<int32_t*>(this + 1); }
    HYBRID_EP_HD static int bytes(int num_local_experts) {
        return layout::round_up(int(sizeof(Mail)) + (num_local_experts + 1) * 4, 128);
    }
};

// What tells that a call, or a part of it, is done (device/flag.cuh).
HYBRID_EP_HD uint64_t flag_value(uint64_t epoch, uint32_t signature) {
    return (epoch << 16) | signature;
}
constexpr uint32_t kCopiedSignature = 0;     // of the copy engine's flags
constexpr uint32_t kAnySignature = 0x10000;  // of a wait that does not look at it
constexpr uint64_t kFlagStep = 1ull << 16;   // adds one to the number in a flag

// In device memory. The call counters live here, so that a replayed CUDA graph counts on.
struct DeviceState {
    static constexpr int kEngineSteps = 16;

    uint64_t epoch[3];         // calls finished, by phase; their sum is the number of verbs
    uint64_t announcement[3];  // of the latest call of a phase
    uint64_t layout_base;      // plus the number of a route: the number of its layout
    // Zero between calls; the last block of a kernel that closes a call zeroes the first four.
    uint32_t blocks_started;  // of a combine, whose order matters
    uint32_t blocks_done;
    uint32_t steps_taken;   // of the walk over the copies of the call (device/copy_walk.cuh)
    uint32_t tokens_taken;  // of the sums at home
    // By the launch of a dispatch that publishes early, and by the one that pulls. Only the end of
    // that one zeroes them: it takes parcels while the route before it ends.
    uint32_t parcels_taken[2];
    uint32_t faulted;
    uint64_t rows_copied[kEngineSteps];  // flags that the copy engine raises in a dispatch
};

// What a block was doing; the names are those of hybrid_ep/backends/cuda/trace.py.
enum class Span : uint16_t {
    kPublishRouting = 0,
    kAwaitRouting = 1,
    kAssignRows = 2,
    kPublishRows = 3,
    kZeroPadding = 4,
    kAwaitRows = 5,
    kPullRows = 6,
    kAwaitInbox = 7,
    kPushSums = 8,
    kAwaitSums = 9,
    kSumAtHome = 10,
    kRelayRouting = 11,
    kSendRows = 12,
    kForwardSums = 13,
};

struct TraceEvent {
    uint64_t begin_ns, end_ns;  // of the GPU's global timer
    uint32_t epoch;
    uint16_t block, span, sm;
};

// In device memory; null without Config(trace=True).
struct Trace {
    static constexpr uint32_t kCapacity = 1u << 17;  // later events are not kept
    TraceEvent* events;
    uint32_t* count;
};

struct Watch {
    DeviceState* state;
    Fault* fault;
    const uint64_t* calls;  // [ranks, layout::kCallWords], what peers announce to me
    uint64_t timeout_ns;
};

}  // namespace hybrid_ep
