// Blocks of up to two tiles of rows by two of columns, and their sums: tiles 0 to 3, row tile by
// row tile. Tiles 4 and 5 are rows of x; 6 and 7 columns of the weight.
#pragma once

#include "common/amx_tile.h"

namespace jaxtap {
namespace {

constexpr int64_t kRows = 32;  // two tiles of rows by two of columns: 4 sums, 2 and 2 operands

struct Shape {
  int64_t rows = 0;
  int64_t panels = 0;
  int64_t chunk = 0;  // bytes of a row of x per instruction

  bool operator==(const Shape& other) const {
    return rows == other.rows && panels == other.panels && chunk == other.chunk;
  }
};

thread_local Shape configured;  // rows 0: none

inline void configure(const Shape& shape) {
  if (configured == shape) return;
  TileConfig config;
  const int64_t first = shape.rows < 16 ? shape.rows : 16;
  const int64_t rows[2] = {first, shape.rows - first};
  for (int i = 0; i < 2; ++i) {
    if (rows[i] == 0) continue;
    config.set(4 + i, rows[i], shape.chunk);
    for (int j = 0; j < 2 && j < shape.panels; ++j) config.set(2 * i + j, rows[i], 64);
  }
  for (int j = 0; j < 2 && j < shape.panels; ++j) config.set(6 + j, shape.chunk / 4, 64);
  tile_configure(config);
  configured = shape;
}

inline void release() {
  tile_release();
  configured = Shape();
}

inline void zero_sums(const Shape& shape) {
  tile_zero<0>();
  if (shape.panels > 1) tile_zero<1>();
  if (shape.rows > 16) tile_zero<2>();
  if (shape.rows > 16 && shape.panels > 1) tile_zero<3>();
}

// int32 or float; `stride` in numbers.
template <typename Sum>
inline void load_sums(const Shape& shape, const Sum* sums, int64_t stride) {
  tile_load<0>(sums, 4 * stride);
  if (shape.panels > 1) tile_load<1>(sums + 16, 4 * stride);
  if (shape.rows > 16) tile_load<2>(sums + 16 * stride, 4 * stride);
  if (shape.rows > 16 && shape.panels > 1) tile_load<3>(sums + 16 * stride + 16, 4 * stride);
}

template <typename Sum>
inline void store_sums(const Shape& shape, Sum* sums, int64_t stride) {
  tile_store<0>(sums, 4 * stride);
  if (shape.panels > 1) tile_store<1>(sums + 16, 4 * stride);
  if (shape.rows > 16) tile_store<2>(sums + 16 * stride, 4 * stride);
  if (shape.rows > 16 && shape.panels > 1) tile_store<3>(sums + 16 * stride + 16, 4 * stride);
}

}  // namespace
}  // namespace jaxtap
