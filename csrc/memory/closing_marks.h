// Where peers say that they have unmapped a part of this rank's symmetric memory. The marks are in
// blocks of their own, which live as long as the process: so a mark is written after the unmapping,
// and never through the mapping that it speaks of.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hybrid_ep::memory {

// A run of 64-bit marks, one for each rank of a Buffer.
struct MarkRun {
    int block = -1;  // -1: none
    int first = 0, count = 0;
};

// On the current device; the marks become zero by work that is queued there.
MarkRun take_marks(int count);
// No peer writes into them any more.
void give_back_marks(MarkRun& run);

uint64_t* address_of(const MarkRun& run);
// What a peer process needs to map the block; the run begins `first` marks behind its start.
cudaIpcMemHandle_t ipc_handle_of(const MarkRun& run);

}  // namespace hybrid_ep::memory
