// cuBLASLt's handles: one per device, for the whole process.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "cuda/cublaslt.h"
#include "cuda/device_scope.h"

namespace jaxtap::cuda {

class LtHandles {
 public:
  // Creates it where it's the first for this device. What failed is tried again next time.
  LtHandle of(CublasLt& lt, Runtime& cuda, int device) {
    std::lock_guard<std::mutex> hold(lock_);
    std::unique_ptr<OwnedHandle>& entry = handles_[device];
    if (entry == nullptr) {
      auto made = std::make_unique<OwnedHandle>(lt);
      const DeviceScope scope(cuda, device);
      lt.check(lt.create(made->place()), "starting cuBLASLt");
      entry = std::move(made);
    }
    return entry->get();
  }

 private:
  std::mutex lock_;
  std::map<int, std::unique_ptr<OwnedHandle>> handles_;
};

// Those of the process, for as long as it is: the library may be gone when it ends.
inline LtHandles& lt_handles() {
  static auto* handles = new LtHandles;
  return *handles;
}

}  // namespace jaxtap::cuda
