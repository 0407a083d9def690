// Quantized values and scales back to numbers.
#pragma once

#include <cstdint>

#include "common/forward.h"
#include "te/modes.h"

namespace jaxtap::te {

struct Dequantize {
  const uint8_t* qvalues = nullptr;  // [rows, cols]
  int64_t rows = 0, cols = 0;
  QType qtype = QType::kE4M3;
  Scaling scaling = Scaling::kDelayedTensor;
  // float[1]; per channel float[rows]; MX: e8m0 [rows, cols / 32], or [rows / 32, cols].
  const void* scales = nullptr;
  bool by_column = false;  // MX: blocks are of 32 rows
  void* out = nullptr;     // [rows, cols]
  Float dtype = Float::kF32;
};

// value * scale in float32, rounded to `dtype`.
void dequantize(const Dequantize& args, const Parallel& parallel);

}  // namespace jaxtap::te
