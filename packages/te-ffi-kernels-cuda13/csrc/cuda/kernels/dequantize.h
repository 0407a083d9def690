// Codes and scales back to numbers.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"
#include "te/modes.h"

namespace jaxtap::cuda {

// As te::Dequantize, with arrays of the device.
struct Dequantize {
  const uint8_t* codes = nullptr;  // [rows, cols]
  int64_t rows = 0, cols = 0;
  te::Code code = te::Code::kE4M3;
  te::Scaling scaling = te::Scaling::kDelayedTensor;
  const void* scales = nullptr;
  bool by_column = false;
  void* out = nullptr;
  te::Float dtype = te::Float::kF32;
};

void dequantize(const Dequantize& args, Stream stream);

}  // namespace jaxtap::cuda
