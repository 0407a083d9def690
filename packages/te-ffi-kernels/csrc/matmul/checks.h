// Panels of a packed weight, and their headers.
#pragma once

#include "matmul/matmul.h"

namespace jaxtap {

inline const uint8_t* panel_at(const PackedWeights& w, int64_t index) {
  return static_cast<const uint8_t*>(w.buffer) + index * w.panel_bytes;
}

// Checks the headers of `count` panels, and returns the sum of their keys.
inline uint64_t check_headers(const PackedWeights& w, int64_t first, int64_t count) {
  uint64_t keys = 0;
  for (int64_t i = first; i < first + count; ++i) {
    const int columns = panel_columns(w.n, i, w.layout.columns());
    keys += check_header(panel_at(w, i), w.layout, columns, i);
  }
  return keys;
}

}  // namespace jaxtap
