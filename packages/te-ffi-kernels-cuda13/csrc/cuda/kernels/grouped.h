// Quantization of groups of rows one by one, in tiles of 64 rows.
#pragma once

#include <cstdint>

#include "cuda/kernels/group_starts.h"
#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {

constexpr int64_t kGroupTile = 64;  // rows

// Arrays of the device. Results are nullptr where they aren't wanted, and have those of the groups
// one after the other; transposed quantized values are transposed within each group.
struct GroupedQuantize {
  const void* x = nullptr;  // [length, rows_each, cols]
  te::Float dtype = te::Float::kF32;
  int64_t length = 0, rows_each = 1, cols = 0;
  const int32_t* sizes = nullptr;  // [groups], with a sum of at most `length`
  int64_t groups = 0;
  te::QType qtype = te::QType::kE4M3;
  te::Scaling scaling = te::Scaling::kDelayedTensor;
  const float* scale = nullptr;  // [groups], per tensor

  uint8_t *qvalues = nullptr, *colwise = nullptr;
  void* scales = nullptr;         // float[groups], float[rows], or e8m0
  void* colwise_scales = nullptr;  // float[groups], float[groups, cols], or e8m0
  float* absmax = nullptr;        // [groups]: per tensor the largest magnitude, else 0
  GroupStart* starts = nullptr;   // [groups + 1], memory

  int64_t rows() const { return length * rows_each; }
};

// What rows have that no group has is zero. Where sizes are negative, have a larger sum, or with MX
// by column aren't whole blocks, every byte of the results is 0xff: scales and magnitudes are NaN.
void grouped_quantize(const GroupedQuantize& args, Stream stream);

// What no group has.
void grouped_rest(const GroupedQuantize& args, Stream stream);

}  // namespace jaxtap::cuda
