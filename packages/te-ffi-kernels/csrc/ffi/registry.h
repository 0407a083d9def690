// The list of targets that this module brings, each with its stages.

#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxtap::ffi {

// On CPU, XLA calls `instantiate` once per call site and loaded executable, with the attributes
// alone, and `execute` for every call. It never calls `prepare` and `initialize` there.
struct Target {
  const char* name;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
};

inline std::vector<Target>& Targets() {
  static auto* targets = new std::vector<Target>;
  return *targets;
}

}  // namespace jaxtap::ffi
