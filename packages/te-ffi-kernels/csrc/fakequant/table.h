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

// Indexed by te::Float.
struct Table {
  // Of `count` numbers and 0: NaN where one of them is.
  Extremes (*extremes[3])(const void* x, int64_t count);
  // `inside` is 1 where a number is within the bounds, in the dtype of x, and else 0.
  void (*round[3])(const void* x, void* out, uint8_t* inside, int64_t count, const Grid& grid,
                   const Extremes& bounds);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::fakequant
