// Turns a failed CUDA call into a C++ exception, which pybind11 hands to Python as RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace hybrid_ep {

inline void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        cudaGetLastError();  // a sticky error would otherwise be blamed on the next call
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

// That a kernel may ask for.
inline int shared_memory_per_block(int device) {
    int bytes = 0;
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "shared memory of the device");
    return bytes;
}

}  // namespace hybrid_ep
