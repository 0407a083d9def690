// What one instruction set offers to fake quantization. Numbers outside of a loop's arrays are
// never read or written, at any length and alignment.
#pragma once

#include <cstdint>

namespace jaxtap::fakequant {

// What rounding to a range reads: the step, its reciprocal, and the least and the greatest number
// of steps from 0.
struct Grid {
  float scale, reciprocal, least, most;
};

struct Extremes {
  float lower, upper;
};

// Up to eight rows of `count` numbers, one every `stride` numbers.
struct Rows {
  int64_t rows, count, stride;
};

// Indexed by te::Float.
struct Table {
  // Of `count` numbers and 0: NaN where one of them is.
  Extremes (*extremes[3])(const void* x, int64_t count);
  // A byte of `inside` is for the numbers of a column: bit i is set where that of row i is within
  // the bounds, in the dtype of x.
  void (*round[3])(const void* x, void* out, uint8_t* inside, const Rows& rows, const Grid& grid,
                   const Extremes& bounds);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::fakequant
