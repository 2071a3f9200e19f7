// NVSHMEM on the host: the job that this process is part of, and its symmetric heap.
//
// A process takes part in one job, until it ends. The text that NVSHMEM prints about a failure
// becomes the text of the exception; it also reaches stderr, while the call still runs. No CUDA
// call here needs a GPU to load the module.
#pragma once

#include <cstdint>
#include <string>

namespace hybrid_ep::network {

// "3.4.5": what this was built with, and the library that is loaded.
std::string nvshmem_built_version();
std::string nvshmem_loaded_version();

// Made by one rank of a job that is to be, for all others.
std::string nvshmem_unique_id();

// Collective over the job; the device must be current. Throws.
void start_nvshmem(const std::string& unique_id, int rank, int num_ranks);

// Collective over the job, in the same order on all ranks. Throws where there is no room.
char* allocate_symmetric(int64_t bytes);
void free_symmetric(char* memory);

// A rank's part of an allocation, by my part; null where it cannot be mapped.
char* mapped_symmetric(char* mine, int rank);

}  // namespace hybrid_ep::network
