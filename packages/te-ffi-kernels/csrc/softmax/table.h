// What one instruction set offers to softmax: a row at a time. Numbers outside of a loop's arrays
// are never read or written, at any length and alignment.
#pragma once

#include <cstdint>

namespace jaxtap::softmax {

struct Table {
  // Indexed by te::Float, and by whether there is a mask. `scratch` is [padded(count)].
  void (*forward[3][2])(const void* x, const uint8_t* mask, void* out, float* scratch,
                        int64_t count, float scale);
  void (*backward[3])(const void* grad, const void* softmax, void* out, int64_t count,
                      float scale);
};

// Whole vectors of any instruction set.
constexpr int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::softmax
