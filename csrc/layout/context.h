// What every kernel knows: where everything is and how long to wait. Passed by value.
#pragma once

#include "layout/buffer_layout.h"
#include "layout/handle_layout.h"
#include "layout/runtime_state.h"

namespace hybrid_ep {

struct Context {
    Peers peers;  // of my node, by local rank
    int rank, first_peer, num_peers;
    layout::BufferLayout buffer;
    layout::HandleLayout handle;
    Watch watch;
    Trace trace;

    HYBRID_EP_HD int local_rank() const { return rank - first_peer; }
    HYBRID_EP_HD char* mine() const { return peers.base[local_rank()]; }
};

}  // namespace hybrid_ep
