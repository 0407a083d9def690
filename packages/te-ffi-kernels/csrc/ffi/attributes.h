// Reading attributes, with errors that name them.

#pragma once

#include <cstdint>

#include "common/error.h"

namespace jaxtap::ffi {

// From whatever has `get<T>(name)`, the value or nothing.
template <typename T, class Attributes>
T NeedAttribute(const Attributes& attributes, const char* name) {
  const auto value = attributes.template get<T>(name);
  if (value.has_value()) return *value;
  throw invalid_argument("attribute ", name, " is missing, or of another type than it must have");
}

// From whatever has `contains(name)`, too.
template <typename T, class Attributes>
T AttributeOr(const Attributes& attributes, const char* name, T otherwise) {
  return attributes.contains(name) ? NeedAttribute<T>(attributes, name) : otherwise;
}

// What an op is told at compile time, by a call that must have so many operands and results.
template <class Config, class Call>
Config ConfigOf(const Call& call, int64_t operands, int64_t results) {
  call.NeedCounts(operands, results);
  return Config(call.attributes);
}

// Of ops without attributes.
struct NoConfig {
  template <class Attributes>
  explicit NoConfig(const Attributes&) {}
};

}  // namespace jaxtap::ffi
