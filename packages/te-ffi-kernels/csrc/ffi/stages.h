// What all handlers do around their own work: errors, and counting of warm-ups.

#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <string>

#include "common/error.h"
#include "xla/ffi/api/ffi.h"

namespace jaxtap::ffi {

namespace xffi = ::xla::ffi;

// How often each target was warmed up in this process.
std::map<std::string, int64_t> WarmCounts();

// Counts one.
void CountWarm(const char* target);

// Runs the body of a handler. No exception may pass the C interface: each becomes an error of the
// call, which names the target.
template <typename Body>
xffi::Error Guarded(const char* target, Body&& body) {
  try {
    body();
    return xffi::Error::Success();
  } catch (const Error& error) {
    const bool bad_input = error.kind() == ErrorKind::kInvalidArgument;
    return xffi::Error(
        bad_input ? xffi::ErrorCode::kInvalidArgument : xffi::ErrorCode::kFailedPrecondition,
        std::string(target) + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return xffi::Error(xffi::ErrorCode::kResourceExhausted, std::string(target) + ": out of memory");
  } catch (const std::exception& error) {
    return xffi::Error::Internal(std::string(target) + ": " + error.what());
  }
}

// Runs a warm-up. `warm` is the kernel's Warm(config), which knows nothing of stages: it's called
// from `instantiate` on CPU, and from `initialize` where a platform has that.
template <typename Warm>
xffi::Error Warmed(const char* target, Warm&& warm) {
  return Guarded(target, [&] {
    warm();
    CountWarm(target);
  });
}

}  // namespace jaxtap::ffi
