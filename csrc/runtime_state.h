// The few words that kernels and host share besides the symmetric memory.
#pragma once

#include "layout/bytes.h"

namespace hybrid_ep {

// Every peer's symmetric memory, mine included, mapped into this process.
struct Peers {
    char* base[layout::kMaxRanks];
};

enum class FaultKind : uint64_t { kNone = 0, kTimeout = 1, kOtherCall = 2, kBadExpert = 3 };

// In mapped host memory. `kind` is written last.
struct Fault {
    uint64_t kind;
    int32_t phase, peer, channel, unused;
    uint64_t epoch, seen;
};

// The number of rows of an exact dispatch, on its way to the waiting host. In mapped host memory;
// `ticket` is written last.
struct Mail {
    uint64_t ticket;
    int64_t required_rows;
};

// In device memory. The call counters live here, so that a replayed CUDA graph counts on.
struct DeviceState {
    uint64_t epoch[3];  // calls finished, by phase
    uint32_t blocks_done;
    uint32_t faulted;
};

struct Watch {
    DeviceState* state;
    Fault* fault;
    uint64_t timeout_ns;
};

}  // namespace hybrid_ep
