// Symmetric memory of the ranks of one host, through CUDA IPC.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "layout/runtime_state.h"
#include "memory/closing_marks.h"
#include "memory/process_identity.h"

namespace hybrid_ep::memory {

// Owns this rank's part and the mappings of the peers' parts. The memory is zeroed at first. It is
// no PyTorch memory: nothing caches, pauses or defragments it.
//
// Closing waits for no peer, and yet no part is freed while a peer maps it: each rank leaves a mark
// in its peers' closing marks when it has unmapped their parts, and a part is freed when every peer
// has left its mark or has ended as a process. Until then it is kept aside, and looked at again
// when a Buffer is made or closed, and by free_unread_parts().
class PeerMemory {
  public:
    PeerMemory(int rank, int num_ranks, int64_t bytes);
    ~PeerMemory() { close(); }
    PeerMemory(const PeerMemory&) = delete;
    PeerMemory& operator=(const PeerMemory&) = delete;

    // What a peer process needs to map this rank's part.
    std::string handle();
    // Maps the parts of all ranks, `handles` in rank order (mine is ignored).
    void open(const std::vector<std::string>& handles);

    // Both idempotent; the GPU must have finished this rank's kernels.
    void unmap_peers();
    void close();
    // Instead of close(), once all ranks have unmapped: nothing is kept aside.
    void free_now();

    const Peers& peers() const { return peers_; }

  private:
    int rank_, num_ranks_;
    bool is_exported_ = false;
    Peers peers_{};
    MarkRun marks_{};  // mine, in which peers leave theirs
    struct TheirMarks {
        uint64_t* block = nullptr;  // mapped; null: not
        int first = 0;
    };
    std::vector<TheirMarks> theirs_;          // by rank: where I leave mine
    std::vector<ProcessIdentity> processes_;  // by rank
};

// Frees the parts of closed Buffers that no peer maps any more. After a barrier behind all ranks'
// close() that is all of a Buffer.
void free_unread_parts();

}  // namespace hybrid_ep::memory
