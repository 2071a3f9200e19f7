// Every kernel of an extension, so that all can be loaded before the first of them runs.
//
// CUDA loads a kernel when it is first needed, and that may wait for kernels that run: which may be
// some that wait for a peer, and the peer perhaps for the kernel that is being loaded. So a runtime
// loads all when it is made.
#pragma once

namespace hybrid_ep::kernels {

// Called when the extension is imported, by kKernel (launch.cuh) alone.
void register_kernel(const void* kernel);

// All of them, on the current device, unless that was done before.
void load_kernels();

// That a launch of the kernel on the current device may ask for, at most; loads it if need be.
int dynamic_shared_memory(const void* kernel);

// Whether the current device has room for a cluster of two blocks with as much shared memory as
// they may have: a part of a GPU may have none.
bool fit_in_pairs(const void* kernel, int threads);

// How many there are, for tests.
int num_kernels();

}  // namespace hybrid_ep::kernels
