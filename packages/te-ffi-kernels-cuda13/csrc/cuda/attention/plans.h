// cuDNN's plans, one per device and graph, for the whole process: building one takes up to seconds,
// and the layers of a model ask for the same. Each has its handle, since a handle is of one thread
// at a time: running a plan waits for no other that is being built.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/cudnn.h"
#include "cuda/device_scope.h"

namespace jaxtap::cuda {

class DnnPlans {
 public:
  // A plan on a device, or why cuDNN has none.
  struct Entry {
    explicit Entry(Cudnn& dnn) : handle(dnn), plan(dnn) {}
    OwnedDnnHandle handle;
    OwnedDnnPlan plan;  // destroyed before the handle
    size_t workspace = 0;
    std::string why;
    mutable std::mutex running;  // the handle's stream is set before each run
  };

  // Builds it where it's the first of its kind, for which others that ask for the same wait. What
  // failed is tried again next time; that cuDNN doesn't have a graph is kept.
  const Entry& of(Cudnn& dnn, Runtime& cuda, int device, const AttentionGraph& graph) {
    Place& place = at(device, graph.key());
    std::lock_guard<std::mutex> hold(place.building);
    if (place.entry != nullptr) return *place.entry;
    const DeviceScope scope(cuda, device);
    auto entry = std::make_unique<Entry>(dnn);
    check_run(dnn, dnn.create(entry->handle.place()), "starting cuDNN", cuda);
    const int status = dnn.build(entry->handle.get(), graph, entry->plan.place(),
                                 &entry->workspace, &entry->why);
    check_run(dnn, status, "planning attention", cuda);
    cuda.clear_error();  // what cuDNN tried and left
    place.entry = std::move(entry);
    return *place.entry;
  }

 private:
  struct Place {
    std::mutex building;
    std::unique_ptr<Entry> entry;
  };

  Place& at(int device, const AttentionGraph::Key& key) {
    std::lock_guard<std::mutex> hold(lock_);
    std::unique_ptr<Place>& place = places_[{device, key}];
    if (place == nullptr) place = std::make_unique<Place>();
    return *place;
  }

  std::mutex lock_;  // of the map, never while anything is built
  std::map<std::pair<int, AttentionGraph::Key>, std::unique_ptr<Place>> places_;
};

}  // namespace jaxtap::cuda
