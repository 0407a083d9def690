// Where groups of rows begin. Their sizes are read on the device: nobody waits for it, and what is
// launched is the same whatever the sizes are.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace jaxtap::cuda {

// Where a group begins: its first row, and its first tile of rows. One more entry follows the last
// group's: where that ends, or kNoRow and no tile if the sizes can't be.
struct GroupStart {
  int64_t row, tile;
};

constexpr int64_t kNoRow = -1;

// Arrays of the device.
struct GroupSizes {
  const int32_t* sizes = nullptr;  // [groups]; a negative one can't be
  int64_t groups = 0;
  int64_t length = 0;       // what there is of the axis that is divided
  bool may_exceed = false;  // whether the sizes may have a larger sum
  int64_t rows_each = 1;    // rows for each of the axis
  int64_t unit = 1;         // of which groups must have a multiple of rows
  int64_t tile = 1;         // rows of a tile

  // Numbers of groups: 1 over `scale`, where that is given, and zeros; nullptr: unwanted.
  const float* scale = nullptr;
  float *scales = nullptr, *colwise_scales = nullptr, *zeros = nullptr;
};

void find_group_starts(const GroupSizes& sizes, GroupStart* starts, Stream stream);

// The most tiles that `rows` rows in groups can be, with those of the rows that no group has.
constexpr int64_t most_tiles(int64_t rows, int64_t groups, int64_t tile) {
  return rows / tile + (groups < rows ? groups : rows) + 1;
}

}  // namespace jaxtap::cuda
