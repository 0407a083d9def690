// Matmuls of two matrices, in floats or in quantized values with scales, and what is done to their
// results.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "te/modes.h"

namespace jaxtap::te {

// A factor. Lanes are what the result has as rows (of lhs) or columns (of rhs).
struct Factor {
  const void* data = nullptr;
  DType dtype = DType::F32;
  bool k_is_last = true;  // [lanes, k]; else [k, lanes]
  // None: nullptr. Per tensor float[1], per channel float[lanes]. MX: e8m0 of 32 along k:
  // [lanes, k / 32], or [k / 32, lanes].
  const void* scales = nullptr;
};

struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  Scaling scaling = Scaling::kNone;
  Factor lhs, rhs;
  float alpha = 1.0f;
  void* out = nullptr;  // [m, n]
  Float out_dtype = Float::kF32;

  // out = activation(alpha * matmul + bias), summed in float32, rounded once.
  const void* bias = nullptr;  // of out_dtype [n]
  bool gelu = false;
};

void gemm(const Gemm& args, const Parallel& parallel);

// The largest k with which products of int8 are exact.
constexpr int64_t kMostInt8 = 131071;

}  // namespace jaxtap::te
