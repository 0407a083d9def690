// Reading attributes, with errors that name them.

#pragma once

#include "common/error.h"
#include "xla/ffi/api/ffi.h"

namespace jaxtap::ffi {

namespace xffi = ::xla::ffi;

template <typename T>
T NeedAttribute(const xffi::Dictionary& attributes, const char* name) {
  if (attributes.contains(name)) {
    const auto value = attributes.get<T>(name);
    if (value.has_value()) return *value;
  }
  throw invalid_argument("attribute ", name, " is missing, or of another type than it must have");
}

}  // namespace jaxtap::ffi
