// What products with packed weights are made of where gemv.h isn't enough: rows in codes, products
// of codes, weights as cuBLASLt's products take them; and packing.
#pragma once

#include <cstdint>

#include "common/packed.h"
#include "cuda/runtime.h"
#include "te/table.h"

namespace jaxtap::cuda {

// Rows to int8 as the CPU's matmul with `planes` 1 has it: a scale for each row, or for each of its
// groups.
struct PackedRows {
  const void* x = nullptr;  // [m, k]
  te::Float x_dtype = te::Float::kF32;
  int64_t m = 0, k = 0, padded_m = 0, padded_k = 0;
  int64_t group = 0;
  int8_t* codes = nullptr;  // [padded_m, padded_k], with zeros beyond m and k
  float* scales = nullptr;  // [m, groups]
};

// 1 for rows without an infinity or NaN, NaN for those with one.
struct PackedFinite {
  const void* x = nullptr;  // [m, k]
  te::Float x_dtype = te::Float::kF32;
  int64_t m = 0, k = 0;
  float* factors = nullptr;  // [m]
};

// Products of codes, each sum of a group exact, then times the scale of the row and that of the
// column; groups are added up in their order, so that results are the CPU's, bit by bit. Columns of
// a panel whose header isn't that of a weight of this shape are NaN.
struct PackedDot {
  const int8_t* x = nullptr;        // [m, padded_k]
  const float* x_scales = nullptr;  // [m, groups]
  int64_t m = 0, n = 0;
  PanelLayout layout;  // of 8 bits
  const uint8_t* weight = nullptr;
  void* y = nullptr;                // [m, n]
  te::Float y_dtype = te::Float::kF32;
};

// A weight as [cols, depth], where cols are those of all panels, and what columns of sums are to be
// multiplied with: NaN where a panel's header isn't that of this weight.
//
// As int8 without groups: depth is padded_k, and the factors are the scales.
// As floats: depth is k. Without groups these are codes, which are exact, and the factors are the
// scales. With groups they are codes times scales, relative to a power of two, which is the factor:
// in float32 rounded once; in 16 bits in two parts, the second of which is what rounding to the
// first one took away.
struct PackedWeight {
  const uint8_t* weight = nullptr;
  PanelLayout layout;
  int64_t n = 0;
  bool as_codes = false;
  te::Float dtype = te::Float::kF32;
  void* out = nullptr;       // [parts, cols, depth]
  float* factors = nullptr;  // [cols]
};

inline int packed_parts(const PackedWeight& args) {
  return !args.as_codes && args.layout.group != 0 && args.dtype != te::Float::kF32 ? 2 : 1;
}

// The bytes that the CPU's `pack` writes. Codes beyond 4 bits wrap around.
struct PackedPack {
  const int8_t* codes = nullptr;  // [k, n]
  const void* scales = nullptr;   // [groups, n], float32 or float16
  PanelLayout layout;
  int64_t n = 0;
  uint8_t* out = nullptr;
};

void packed_rows(const PackedRows& args, Stream stream);
void packed_finite(const PackedFinite& args, Stream stream);
void packed_dot(const PackedDot& args, Stream stream);    // for a few rows
void packed_tiles(const PackedDot& args, Stream stream);  // for many
void packed_unpack(const PackedWeight& args, Stream stream);
void packed_pack(const PackedPack& args, Stream stream);

}  // namespace jaxtap::cuda
