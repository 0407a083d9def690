// Quantization to int8 for training: magnitudes, scales, random bits and rounding in one call.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "te/modes.h"
#include "training/table.h"

namespace jaxtap::training {

struct Args {
  // x is [groups, blocks, rows, columns].
  int64_t groups = 1, blocks = 1, rows = 0, columns = 0;
  te::Float dtype = te::Float::kF32;
  const void* x = nullptr;
  // Whether each row of a block has a scale, else each column.
  bool by_row = true;
  // What numbers are multiplied with first: by row one for each column of a block, else one for
  // each of its rows; or nullptr.
  const float* factors = nullptr;
  Noise noise = Noise::kNone;
  const float* given = nullptr;    // [groups, blocks, rows]
  const uint32_t* keys = nullptr;  // [groups, 2]; a number's index is that in its group
  int8_t* out = nullptr;           // like x
  float* scales = nullptr;         // one for each row, or each column, of all blocks
};

// scale = max(largest magnitude * (1 / 127), least normal number), and quantized values are of
// x * factor * (1 / scale) + noise, half to even, from -127 to 127. With an infinity the scale is
// infinite, infinities become +-127 and other numbers 0 (but for noise); with a NaN it is NaN, and
// quantized values are 0. A group has less than 2^32 numbers.
void quantize_int8(const Args& args, const Parallel& parallel);

}  // namespace jaxtap::training
