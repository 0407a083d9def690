#include "ffi/stages.h"

#include <mutex>

namespace jaxtap::ffi {
namespace {

std::mutex& Lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

std::map<std::string, int64_t>& Counts() {
  static auto* counts = new std::map<std::string, int64_t>;
  return *counts;
}

}  // namespace

std::map<std::string, int64_t> WarmCounts() {
  std::lock_guard<std::mutex> hold(Lock());
  return Counts();
}

void CountWarm(const char* target) {
  std::lock_guard<std::mutex> hold(Lock());
  ++Counts()[target];
}

}  // namespace jaxtap::ffi
