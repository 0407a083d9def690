// Products of matrices of int8 that a training step quantized: of both sides what is summed may be the
// rows, as a gradient of weights has it, or the columns.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/parallel.h"

namespace jaxtap::training {

struct Dot {
  int64_t groups = 1, k = 0, m = 0, n = 0;
  // Whether a side ends with what is summed.
  bool lhs_last = false, rhs_last = false;
  const int8_t* lhs = nullptr;        // [groups, k, m], or [groups, m, k]
  const int8_t* rhs = nullptr;        // [groups, k, n], or [groups, n, k]
  const float* lhs_scales = nullptr;  // [groups, m]
  const float* rhs_scales = nullptr;  // [groups, n]
  float* out = nullptr;               // [groups, m, n]
};

// out[i][j] = float32(sum over k of lhs[k][i] * rhs[k][j]) * scale of i * scale of j, rounded once per
// operation, whatever the layout. Throws Error (invalid argument) for sums that int32 doesn't hold.
void dot_int8(const Dot& args, const Parallel& parallel, Isa isa);

}  // namespace jaxtap::training
