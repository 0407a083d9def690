// The device that CUDA's calls of a thread are for.
#pragma once

#include "cuda/runtime.h"

namespace jaxtap::cuda {

// Makes a device the thread's, from construction to destruction.
class DeviceScope {
 public:
  // Throws CudaError where it can't be made so; the thread's is what it was then.
  DeviceScope(Runtime& cuda, int device) : cuda_(cuda) {
    check_run(cuda_, cuda_.current_device(&before_), "asking for the device", cuda_);
    if (before_ == device) return;
    const int code = cuda_.set_device(device);
    changed_ = true;
    if (code != 0) restore();
    check_run(cuda_, code, "changing the device", cuda_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() { restore(); }

 private:
  void restore() {
    if (!changed_) return;
    changed_ = false;
    if (cuda_.set_device(before_) == 0) return;
    cuda_.set_device(before_);  // once more: a call that failed may have done nothing
    cuda_.clear_error();
  }

  Runtime& cuda_;
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace jaxtap::cuda
