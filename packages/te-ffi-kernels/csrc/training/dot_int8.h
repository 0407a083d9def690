// Products of matrices of int8 that lie as a gradient of weights has them: rows are what is summed.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/parallel.h"

namespace jaxtap::training {

struct Dot {
  int64_t groups = 1, k = 0, m = 0, n = 0;
  const int8_t* lhs = nullptr;       // [groups, k, m]
  const int8_t* rhs = nullptr;       // [groups, k, n]
  const float* lhs_scales = nullptr;  // [groups, m]
  const float* rhs_scales = nullptr;  // [groups, n]
  float* out = nullptr;              // [groups, m, n]
};

// out[i][j] = float32(sum over k of lhs[k][i] * rhs[k][j]) * scale of i * scale of j, rounded once per
// operation. Throws Error (invalid argument) for sums that int32 doesn't hold.
void dot_int8(const Dot& args, const Parallel& parallel, Isa isa);

}  // namespace jaxtap::training
