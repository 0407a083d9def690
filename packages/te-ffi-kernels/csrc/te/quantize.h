// Quantization of a matrix in one pass: codes, transposed codes, scales, column sums, and the
// largest magnitude.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "te/modes.h"

namespace jaxtap::te {

struct Quantize {
  const void* x = nullptr;  // [rows, cols]
  Float dtype = Float::kF32;
  int64_t rows = 0, cols = 0;
  Code code = Code::kE4M3;
  Scaling scaling = Scaling::kDelayedTensor;
  float scale = 1.0f;  // per tensor: codes are of x * scale

  // Results; nullptr where they aren't wanted. No two overlap.
  uint8_t* codes = nullptr;   // [rows, cols]
  uint8_t* turned = nullptr;  // by column: [cols, rows], or [rows, cols] with MX
  // Per channel and with MX, what codes are multiplied with to get x: float[rows], float[cols];
  // e8m0 [rows, cols / 32], [rows / 32, cols].
  void* scales = nullptr;
  void* turned_scales = nullptr;
  void* sums = nullptr;  // over rows, summed in float32, rounded to `dtype`: [cols]

  bool wants_absmax = false;
};

// Returns the largest magnitude, not counting NaN, where it's wanted. MX needs columns (for codes
// by row) and rows (for codes by column) in multiples of 32.
float quantize(const Quantize& args, const Parallel& parallel);

// Calls every loop of the table that `quantize` may use for these, once, on little.
void warm_quantize(Scaling scaling, bool rowwise, bool colwise, bool sums);

}  // namespace jaxtap::te
