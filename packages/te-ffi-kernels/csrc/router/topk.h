// The largest numbers of rows, and where they are.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "te/table.h"

namespace jaxtap::router {

// Numbers are ordered by their bits: NaN beyond infinity, -0 below 0. Of equal ones the lower index
// comes first.
struct TopK {
  const void* keys = nullptr;  // [rows, cols]
  te::Float dtype = te::Float::kF32;
  int64_t rows = 0, cols = 0, k = 0;
  void* values = nullptr;      // [rows, k], of dtype, the largest first
  int32_t* indices = nullptr;  // [rows, k]
};

void topk(const TopK& args, const Parallel& parallel);

}  // namespace jaxtap::router
