// Sums over rows, in two stages: blocks add up parts of the rows, and then a few blocks add up the
// parts. How many parts there are, and with them the order of a sum, depends on the shape alone.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"
#include "te/modes.h"

namespace jaxtap::cuda {

struct ColumnSums {
  int64_t rows = 0, cols = 0;
  te::Float dtype = te::Float::kF32;  // that sums are rounded to
  void* out[2] = {};       // [cols] each: a source has one or two sums of a column; nullptr: unwanted
  float* parts = nullptr;  // memory of sum_numbers numbers
};

// How many parts rows are divided into, and the rows of one. One part is added up in one stage.
struct SumParts {
  int64_t count, rows;
};
SumParts sum_parts(int64_t rows, int64_t cols);

// Numbers that the parts of `kinds` sums of a column take; 0 for one part.
int64_t sum_numbers(int64_t rows, int64_t cols, int64_t kinds);

// The second stage.
void add_up_parts(const ColumnSums& sums, int64_t kinds, Stream stream);

}  // namespace jaxtap::cuda
