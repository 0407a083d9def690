// What is kept of a call site: on which devices it was warmed up, and what was made for each.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/capture.h"

namespace jaxtap::cuda {

// What is made once per call site and device, such as a plan.
struct PerDevice {
  virtual ~PerDevice() = default;
};

// XLA makes one per call site and loaded executable, and calls `initialize` with it before every
// execution, from several threads at once where there are several devices.
class CallSite {
 public:
  // Warms a device up, unless it was: calls body(stream) with a stream of `streams` that captures,
  // unless XLA's does. Returns whether it did.
  // Threads that come meanwhile to warm the same device wait. What failed, or was left out since
  // the stream captured already, is tried again at the next execution.
  template <typename Body>
  bool warm(Runtime& cuda, PrivateStreams& streams, int device, Stream xla, Body&& body) {
    Device& entry = of(device);
    if (entry.warm) return false;
    std::lock_guard<std::mutex> hold(entry.warming);
    if (entry.warm) return false;
    entry.warm = dry_run(cuda, streams, device, xla, std::forward<Body>(body));
    return entry.warm;
  }

  // What `make`, which returns a std::unique_ptr<Plan>, made for a device: called at the first
  // time, and again where it threw. `make` doesn't call this.
  template <typename Plan, typename Make>
  Plan& keep(int device, Make&& make) {
    Device& entry = of(device);
    if (Plan* made = kept<Plan>(device)) return *made;
    std::lock_guard<std::mutex> hold(entry.making);
    if (entry.kept == nullptr) {
      entry.kept = std::forward<Make>(make)();
      entry.ready = entry.kept.get();
    }
    return static_cast<Plan&>(*entry.kept);
  }

  // What was made for a device; nullptr where nothing was. Never waits for what is being made.
  template <typename Plan>
  Plan* kept(int device) {
    return static_cast<Plan*>(of(device).ready.load());
  }

 private:
  struct Device {
    std::mutex warming, making;  // two: a plan takes up to seconds
    std::atomic<bool> warm{false};
    std::unique_ptr<PerDevice> kept;
    std::atomic<PerDevice*> ready{nullptr};  // `kept`, for those who don't hold `making`
  };

  Device& of(int device) {
    std::lock_guard<std::mutex> hold(lock_);
    std::unique_ptr<Device>& entry = devices_[device];
    if (entry == nullptr) entry = std::make_unique<Device>();
    return *entry;
  }

  std::mutex lock_;
  std::map<int, std::unique_ptr<Device>> devices_;
};

}  // namespace jaxtap::cuda
