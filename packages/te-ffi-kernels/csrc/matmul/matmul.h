// y = x @ w for packed integer weights, on integer units, or in bfloat16 on AMX and AVX512-BF16.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "common/packed.h"
#include "common/parallel.h"

namespace jaxtap {

// A packed weight and what it is claimed to be, which is checked.
struct PackedWeights {
  const void* buffer = nullptr;  // uint8[panels, panel_bytes], of any alignment
  int64_t panels = 0;
  int64_t panel_bytes = 0;
  int64_t n = 0;
  PanelLayout layout;
};

// What each row of x is multiplied with first: signs, then the orthonormal Hadamard matrix of each
// block (Sylvester's), in float32.
struct Rotation {
  const int8_t* signs = nullptr;  // [k]
  int64_t block = 0;              // a power of two from 2 that divides k; 0: none
};

struct Matmul {
  const void* x = nullptr;  // [m, k] row-major, of any alignment
  DType x_dtype = DType::F32;
  int64_t m = 0;
  PackedWeights weights;
  void* y = nullptr;  // [m, n] row-major, of any alignment
  DType y_dtype = DType::F32;
  // What is added to the product, of y's dtype and any alignment, or null. The product is rounded
  // to y's dtype; the bias is added to that in float32, and the sum is rounded; then the residual
  // so too: bit for bit as by separate additions.
  const void* bias = nullptr;      // [n]
  const void* residual = nullptr;  // [m, n] row-major; may be y itself, else they do not overlap
  // Between which results are cut in the end; a NaN stays.
  bool clamps = false;
  float least = 0.0f, most = 0.0f;
  Rotation rotation;
  // With digits == 1, the scale of all rows instead of one of each, or null: x beyond 127 times that
  // saturates, and a NaN becomes 0.
  const float* x_scale = nullptr;
  // int8 numbers that stand for one of x:
  //   1: x is quantized to int8, per row, or per row and group of the weight; the result is
  //      float32(sum of products) * scale of x * scale of the weight, rounded once per
  //      operation, and added up over groups in their order. On AMX 64 and more rows of bfloat16
  //      with groups are value * scale, rounded to bfloat16: see matmul/floats.h.
  //   2: x in fixed point with 15 bits of the largest magnitude of each group of the weight, or of
  //      each 256 numbers of a row where it has no groups.
  //   3: x in fixed point with 23 bits of the row's largest magnitude.
  //   0: 3 for up to 4 rows, and 2 beyond; 2 for weights whose numbers have two parts or whose
  //      columns have scales, which take longer to multiply or to rescale; none for many rows of
  //      bfloat16 on AMX and AVX512-BF16, which are multiplied as they are with weights in bfloat16:
  //      see matmul/floats.h.
  int digits = 0;
};

// Any m, k, n >= 0; x and y float32, bfloat16 or float16. With digits == 1 a row with a NaN is NaN,
// one with an infinity has infinities or NaN, unless x_scale is given; otherwise a row with either is NaN, but for one with
// an infinity that is multiplied in bfloat16.
// Throws Error (invalid argument) for dtypes, sizes and weights that do not fit.
void matmul(const Matmul& args, const Parallel& parallel, Isa isa);

// The digits that digits == 0 stands for.
int default_digits(int64_t m, const PanelLayout& layout);

}  // namespace jaxtap
