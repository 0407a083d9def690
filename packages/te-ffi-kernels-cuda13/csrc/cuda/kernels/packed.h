// What matmuls with packed weights are made of: rows in quantized values, matmuls on tensor cores,
// weights as cuBLASLt's matmuls take them; and packing.
#pragma once

#include <cstdint>

#include "common/packed.h"
#include "cuda/kernels/group_starts.h"
#include "cuda/runtime.h"
#include "te/table.h"

namespace jaxtap::cuda {

// A stack of weights, and which of them is multiplied with. The index is in memory of the device: as
// XLA's slices have it, a negative one counts from the end, and one beyond the ends is the end.
struct PackedStack {
  const int32_t* index = nullptr;  // nullptr: there is one weight
  int64_t count = 1;               // of weights
  int64_t bytes = 0;               // of one
};

constexpr int64_t kOneGroup = -1;  // rows are not in groups

// Rows to int8 as the CPU's matmul with `digits` 1 has it: a scale for each row, or for each of its
// groups. Without scales, quantized values times theirs, in bfloat16, or float16 where x is that.
struct PackedRows {
  const void* x = nullptr;  // [m, k]
  te::Float x_dtype = te::Float::kF32;
  int64_t m = 0, k = 0, padded_m = 0, padded_k = 0;
  int64_t group = 0;
  void* qvalues = nullptr;  // [padded_m, padded_k], with zeros beyond m and k
  float* scales = nullptr;  // [m, groups]
};

// Matmuls with a packed weight whose groups, if it has any, are multiples of 32 rows, by tensor
// cores: of floats with quantized values, which are exact, summed in float32; or of int8 with them,
// sums of a group exact in int32, then times the scale of the row and that of the column. Rows with
// an infinity or NaN have no finite results. Columns of a panel whose header isn't that of a weight
// of this shape are NaN; checksums of what it holds aren't looked at.
struct PackedMma {
  const void* x = nullptr;  // [m, k]; int8: [m, padded_k]
  const float* x_scales = nullptr;  // [m, groups], of int8
  int64_t m = 0, n = 0;
  PanelLayout layout;
  const uint8_t* weight = nullptr;  // the packed format, at a multiple of 16
  PackedStack stack;
  void* y = nullptr;  // [m, n]
  te::Float y_dtype = te::Float::kF32;

  // Groups of rows, each with the weight of its own index: int32[groups]. Rows beyond the last group
  // give zeros; if a size is negative, all give NaN.
  const int32_t* sizes = nullptr;
  int64_t row_groups = kOneGroup;
  GroupStart* starts = nullptr;  // [row_groups + 1], memory
};

// A weight as [cols, depth], where cols are those of all panels, and what columns of sums are to be
// multiplied with. Without groups these are its scales, NaN where a panel's header isn't that of
// this weight, and quantized values are int8, with depth padded_k, or as they are in 16 bits, where
// depth is k. With groups they are dequantized, NaN in such a panel; and divided by the factor of
// their column where there are factors, so that float16 holds them, whatever the scales.
struct PackedWeight {
  const uint8_t* weight = nullptr;
  PackedStack stack;
  PanelLayout layout;
  int64_t n = 0;
  bool as_int8 = false;
  te::Float dtype = te::Float::kBF16;
  void* out = nullptr;       // [cols, depth]
  float* factors = nullptr;  // [cols], or of groups nullptr
};

// The bytes that the CPU's `pack` writes. Quantized values beyond 4 bits wrap around.
struct PackedPack {
  const int8_t* qvalues = nullptr;  // [k, n]
  const void* scales = nullptr;   // [groups, n], float32 or float16
  PanelLayout layout;
  int64_t n = 0;
  uint8_t* out = nullptr;
};

void packed_rows(const PackedRows& args, Stream stream);
void packed_mma_f32(const PackedMma& args, Stream stream);
void packed_mma_bf16(const PackedMma& args, Stream stream);
void packed_mma_f16(const PackedMma& args, Stream stream);
void packed_mma_int8(const PackedMma& args, Stream stream);
void packed_unpack(const PackedWeight& args, Stream stream);
void packed_pack(const PackedPack& args, Stream stream);

}  // namespace jaxtap::cuda
