// Which norm, with Transformer Engine's numbers.
#pragma once

#include <cstdint>

#include "common/error.h"

namespace jaxtap::norms {

enum class Kind : int64_t { kLayer = 0, kRms = 1 };

// Throws for other numbers.
inline Kind kind_of(int64_t value) {
  if (value != 0 && value != 1) {
    throw invalid_argument("norm_type is ", value, ", and must be 0 (layer norm) or 1 (RMS norm)");
  }
  return static_cast<Kind>(value);
}

}  // namespace jaxtap::norms
