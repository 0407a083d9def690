// What all handlers do around their own work: errors, and counting of warm-ups.

#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <new>
#include <string>

#include "common/error.h"
#include "xla/ffi/api/c_api.h"

namespace jaxtap::ffi {

// How often each target was warmed up in this process.
std::map<std::string, int64_t> WarmCounts();

// Counts one.
void CountWarm(const char* target);

// What became of a call.
struct Failure {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
};

// Runs the body of a handler. No exception may pass the C interface: each becomes an error of the
// call, which names the target.
template <typename Body>
Failure Guarded(const char* target, Body&& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    const bool bad_input = error.kind() == ErrorKind::kInvalidArgument;
    return {bad_input ? XLA_FFI_Error_Code_INVALID_ARGUMENT : XLA_FFI_Error_Code_FAILED_PRECONDITION,
            std::string(target) + ": " + error.what()};
  } catch (const std::bad_alloc&) {
    return {XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, std::string(target) + ": out of memory"};
  } catch (const std::exception& error) {
    return {XLA_FFI_Error_Code_INTERNAL, std::string(target) + ": " + error.what()};
  }
}

}  // namespace jaxtap::ffi
