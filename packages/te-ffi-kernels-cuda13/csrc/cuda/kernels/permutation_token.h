// The rows of a token, which a block has.
#pragma once

#include "cuda/formats.h"
#include "cuda/kernels/permutation.h"

namespace jaxtap::cuda {
namespace {

// Calls body(row, expert) for the rows of a token, as RowMap::each does on the host. All threads of
// a block go through the same rows.
template <class Body>
JAXTAP_DEVICE void each_row(const permutation::RowMap& map, int64_t token, Body&& body) {
  const int64_t experts = map.experts;
  const int32_t* mine = map.entries + token * (2 * experts + 1);
  const int64_t count = mine[2 * experts] < experts ? mine[2 * experts] : experts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t expert = mine[experts + i];
    if (expert < 0 || expert >= experts) continue;
    int64_t row = mine[i];
    if (map.pad_offsets != nullptr) row += map.pad_offsets[expert];
    if (row >= 0 && row < map.rows) body(row, expert);
  }
}

// One number of 2 or 4 bytes.
JAXTAP_DEVICE void copy_number(const void* from, int64_t at, void* to, int64_t there,
                               int64_t bytes) {
  if (bytes == 4) {
    static_cast<uint32_t*>(to)[there] = static_cast<const uint32_t*>(from)[at];
  } else {
    static_cast<uint16_t*>(to)[there] = static_cast<const uint16_t*>(from)[at];
  }
}

}  // namespace
}  // namespace jaxtap::cuda
