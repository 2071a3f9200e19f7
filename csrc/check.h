// What every file of the host side may use. A failed CUDA call becomes a C++ exception, which
// pybind11 hands to Python as RuntimeError.
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

// Calls may come with another device current: it is put back afterwards.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check_cuda(cudaGetDevice(&before_), "current device");
        if (before_ != device) check_cuda(cudaSetDevice(device), "selecting the device");
        changed_ = before_ != device;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace hybrid_ep
