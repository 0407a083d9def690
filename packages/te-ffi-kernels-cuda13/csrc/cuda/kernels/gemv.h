// Products of a few rows with packed weights.
#pragma once

#include <cstdint>

#include "common/packed.h"
#include "cuda/runtime.h"
#include "te/table.h"

namespace jaxtap::cuda {

// As Matmul with `planes` 0 (matmul/matmul.h), with arrays of the device, summed in float32. A row
// with an infinity or NaN is NaN; so are the columns of a panel whose header isn't that of a weight
// of this shape. Checksums of codes and scales aren't looked at.
struct Gemv {
  const void* x = nullptr;  // [m, k]
  te::Float x_dtype = te::Float::kF32;
  int64_t m = 0, n = 0;
  PanelLayout layout;
  const uint8_t* weight = nullptr;  // the packed format, at a multiple of 16
  void* y = nullptr;                // [m, n]
  te::Float y_dtype = te::Float::kF32;
};

void gemv(const Gemv& args, Stream stream);

}  // namespace jaxtap::cuda
