// cuDNN's handles, one per device, and its plans, one per device and graph, for the whole process:
// building one takes up to seconds, and the layers of a model ask for the same.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/cudnn.h"
#include "cuda/device_scope.h"

namespace jaxtap::cuda {

class DnnPlans {
 public:
  // A plan on a device, or why cuDNN has none.
  struct Entry {
    explicit Entry(Cudnn& dnn) : plan(dnn) {}
    OwnedDnnPlan plan;
    size_t workspace = 0;
    std::string why;
    DnnHandle handle = nullptr;
    std::mutex* lock = nullptr;  // of the handle, whose stream is set before each run
  };

  // Builds it where it's the first of its kind. What failed is tried again next time; that cuDNN
  // doesn't have a graph is kept.
  const Entry& of(Cudnn& dnn, Runtime& cuda, int device, const AttentionGraph& graph) {
    Device& place = on(device);
    std::lock_guard<std::mutex> hold(place.lock);
    const auto found = place.entries.find(graph.key());
    if (found != place.entries.end()) return *found->second;
    const DeviceScope scope(cuda, device);
    if (place.handle == nullptr) {
      auto made = std::make_unique<OwnedDnnHandle>(dnn);
      check(dnn, cuda, dnn.create(made->place()), "starting cuDNN");
      place.handle = std::move(made);
    }
    auto entry = std::make_unique<Entry>(dnn);
    entry->handle = place.handle->get();
    entry->lock = &place.lock;
    check(dnn, cuda,
          dnn.build(entry->handle, graph, entry->plan.place(), &entry->workspace, &entry->why),
          "planning attention");
    cuda.clear_error();  // what cuDNN tried and left
    return *(place.entries[graph.key()] = std::move(entry));
  }

 private:
  struct Device {
    std::mutex lock;
    std::unique_ptr<OwnedDnnHandle> handle;
    std::map<AttentionGraph::Key, std::unique_ptr<Entry>> entries;  // destroyed before the handle
  };

  static void check(Cudnn& dnn, Runtime& cuda, int status, const char* what) {
    if (status != 0) cuda.clear_error();
    dnn.check(status, what);
  }

  Device& on(int device) {
    std::lock_guard<std::mutex> hold(lock_);
    std::unique_ptr<Device>& entry = devices_[device];
    if (entry == nullptr) entry = std::make_unique<Device>();
    return *entry;
  }

  std::mutex lock_;
  std::map<int, std::unique_ptr<Device>> devices_;
};

}  // namespace jaxtap::cuda
