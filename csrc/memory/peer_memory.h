// Symmetric memory of the ranks of one host, through CUDA IPC.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "layout/buffer_layout.h"
#include "runtime_state.h"

namespace hybrid_ep::memory {

// Owns this rank's part and the mappings of the peers' parts. The memory is zeroed at first. It is
// no PyTorch memory: nothing caches, pauses or defragments it.
//
// Closing waits for no peer, and yet nobody's memory disappears while a peer still reads it: each
// rank leaves a mark in the others' memory when it unmaps it, and a part is freed when it has all
// marks; until then it is kept aside, and looked at again when a Buffer is made or closed, and by
// free_unread_parts().
class PeerMemory {
  public:
    PeerMemory(int rank, const layout::BufferLayout& layout);
    ~PeerMemory();
    PeerMemory(const PeerMemory&) = delete;
    PeerMemory& operator=(const PeerMemory&) = delete;

    // What a peer process needs to map this rank's part.
    std::string handle() const;
    // Maps the parts of all ranks, `handles` in rank order (mine is ignored).
    void open(const std::vector<std::string>& handles);
    // Idempotent. The GPU must have finished this rank's kernels.
    void close();

    const Peers& peers() const { return peers_; }

  private:
    int rank_;
    layout::BufferLayout layout_;
    Peers peers_{};
};

// Frees the parts of closed Buffers that no peer maps any more. After a barrier behind everybody's
// close() that is all of a Buffer.
void free_unread_parts();

}  // namespace hybrid_ep::memory
