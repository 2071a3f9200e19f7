// Calls may come with another device current: it is put back afterwards.
#pragma once

#include "check.h"

namespace hybrid_ep {

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
