// What one instruction set offers to quantizing for training. Numbers outside of a loop's arrays
// are never read or written, at any length and alignment.
#pragma once

#include <cstdint>

namespace jaxtap::training {

// What is added to numbers in units of the quantized values' steps, before they are rounded.
enum class Noise {
  kNone,
  kGiven,    // a number for each row
  kUniform,  // from 23 random bits for each number
  kLowBits,  // from 8
};

// Numbers of a row, what each is multiplied with first and what then, one over its scale; arrays,
// or nullptr for one number for all.
struct Line {
  const float* factors = nullptr;
  float factor = 1.0f;
  const float* inverses = nullptr;
  float inverse = 1.0f;
  const float* noise = nullptr;
  float noise_of_all = 0.0f;
};

// Draws are of this many numbers at most: `draw` may write as many, whatever it is asked for.
constexpr int64_t kDrawn = 512;

// Indexed by te::Float.
struct Table {
  // The bits of the largest magnitude of numbers times their factors, or those of a NaN.
  int32_t (*absmax[3])(const void* x, int64_t count, const Line& line);
  // The same for each column: of it and what is there.
  void (*absmax_each[3])(const void* x, int64_t count, const Line& line, int32_t* most);
  void (*quantize[3])(const void* x, int64_t count, const Line& line, int8_t* out);
  // Noise of the numbers from `first` on, kUniform or kLowBits: that of index i is made of the two
  // words of Threefry 2x32-20 with the counter (0, i).
  void (*draw)(Noise noise, const uint32_t* key, uint32_t first, int64_t count, float* out);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::training
