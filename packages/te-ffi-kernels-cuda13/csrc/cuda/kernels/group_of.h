// Which group has a tile of rows.
#pragma once

#include "cuda/device.h"
#include "cuda/kernels/group_starts.h"

namespace jaxtap::cuda {
namespace {

// The last group that begins at this tile or before.
JAXTAP_DEVICE int64_t group_of(const GroupStart* starts, int64_t groups, int64_t tile) {
  int64_t low = 0, high = groups;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (starts[middle].tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace
}  // namespace jaxtap::cuda
