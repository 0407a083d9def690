// What a matmul takes beside cuBLASLt's call, which follows from shapes and dtypes alone. For
// quantized values cuBLASLt wants both factors lanes first and their sides multiples of 16; for
// int8 rows of x come in multiples of 32. It rounds its sums once, to few dtypes, and adds a bias
// to some of them. All else is done by kernels, before and after.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/workspace.h"
#include "te/gemm.h"

namespace jaxtap::cuda {

struct GemmWorkspace {
  GemmWorkspace(const te::Gemm& args, bool has_bias);

  // k, and the rows and columns that cuBLASLt computes: those of quantized values are padded.
  int64_t depth = 0, rows = 0, cols = 0;
  bool quantized = false;
  bool exact = false;  // sums are of int8, in int32
  bool mx = false;
  bool arranges_lhs = false, arranges_rhs = false;
  // Whether cuBLASLt's result are sums in 4 bytes, from which a kernel makes the result: in place,
  // or where they are kept apart, from the workspace.
  bool finishes = false, keeps_sums = false;
  bool adds_bias = false;  // cuBLASLt does

  // Where parts of the workspace begin, and the bytes of all. What is left is cuBLASLt's.
  size_t factors = 0, lhs = 0, rhs = 0, lhs_scales = 0, rhs_scales = 0, sums = 0, bytes = 0;
};

// Sides of quantized values, in cuBLASLt's matmuls.
constexpr int64_t kQuantizedSide = 16;

// Rows of int8 (columns, to cuBLASLt). With others, such as 1 to 16, 17, 33 or 77, it has no
// algorithm on some GPUs, and wrong sums on others.
constexpr int64_t kInt8Rows = 32;

}  // namespace jaxtap::cuda
