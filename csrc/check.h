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

}  // namespace hybrid_ep
