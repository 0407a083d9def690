// Reading attributes, with errors that name them.

#pragma once

#include "common/error.h"

namespace jaxtap::ffi {

// From whatever has `contains(name)` and `get<T>(name)`, the value or nothing.
template <typename T, class Attributes>
T NeedAttribute(const Attributes& attributes, const char* name) {
  if (attributes.contains(name)) {
    const auto value = attributes.template get<T>(name);
    if (value.has_value()) return *value;
  }
  throw invalid_argument("attribute ", name, " is missing, or of another type than it must have");
}

template <typename T, class Attributes>
T AttributeOr(const Attributes& attributes, const char* name, T otherwise) {
  return attributes.contains(name) ? NeedAttribute<T>(attributes, name) : otherwise;
}

}  // namespace jaxtap::ffi
