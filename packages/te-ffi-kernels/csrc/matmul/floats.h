// y = x @ w for packed integer weights, in bfloat16: each weight is dequantized once, and the
// products are summed in float32 over all of K, with nothing to rescale on the way. For many rows
// of bfloat16 where the processor multiplies them: an integer matmul converts its sums and rescales
// them once for each group, which takes longer than the products themselves.
//
// A weight with groups is value * scale, rounded to bfloat16. Without groups it is value * the
// power of two of its column's scale, which is exact, and the rest of the scale waits for the sums.
// Rows in int8 with a scale for each group are rounded so first: value * scale, in bfloat16.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/packed.h"
#include "matmul/kernels.h"
#include "matmul/matmul.h"

namespace jaxtap {

constexpr int64_t kStep = 32;        // rows of K of one instruction
constexpr int64_t kRowTile = 16;     // rows of x of one instruction
constexpr int64_t kTileNumbers = kRowTile * kStep;

// A row of bfloat16 to what it is in int8: in each group value * scale, rounded to bfloat16.
struct RoundRow {
  const uint8_t* x;  // bfloat16, unaligned
  int64_t k;         // a multiple of `group`
  int64_t group;
  int8_t* qvalues;  // [group], scratch
  uint16_t* out;  // [k]
};

// Rows of x as `multiply` reads them: tiles [row tiles][steps][16][32] on AMX, else [rows][steps][32].
// What lies beyond k is zero, and beyond `rows` undefined.
struct ArrangeRows {
  const uint8_t* x;  // bfloat16, unaligned
  int64_t x_stride;  // bytes
  int64_t rows;
  int64_t k;     // left from the first step on
  int64_t steps;
  uint16_t* out;
};

// A panel, 16 columns at a time: [steps][16 pairs of rows][16 columns][2 rows]. What lies beyond k
// is zero.
struct Dequantize {
  const uint8_t* panel;  // unaligned
  const PanelLayout* layout;
  int64_t steps;
  uint16_t* out;
  int64_t out_stride;  // from 16 columns to the next, in numbers
  float* rests;        // [columns]: what sums are left to be multiplied with, where there are no groups
};

struct FloatTile {
  const uint16_t* x;  // as `ArrangeRows` gives them
  int64_t rows;
  const uint16_t* w;  // as `Dequantize` gives them
  int64_t w_stride;
  int64_t panels;  // of 16 columns
  int64_t steps;
  float* sums;  // [rows, sums_stride]
  int64_t sums_stride;
  bool first;  // else the sums are added to what `sums` holds
};

struct FloatKernels {
  void (*round_row)(const RoundRow&) = nullptr;  // null where rows in int8 are faster as integers
  void (*arrange_rows)(const ArrangeRows&);
  void (*dequantize)(const Dequantize&);
  void (*multiply)(const FloatTile&);
  void (*epilogue)(const Epilogue&);
  void (*release)() = nullptr;  // at the end of a task, or null
};

#if defined(__x86_64__)
const FloatKernels& amx_float_kernels();
const FloatKernels& avx512_float_kernels();
#endif

// Of an instruction set, on this processor; null where it multiplies no bfloat16.
const FloatKernels* float_kernels_of(Isa isa);

// Rows from which every weight is multiplied so.
constexpr int64_t kManyRows = 256;

// The kernels for a matmul that is computed here: one with many rows of bfloat16, as they are or, on
// AMX, in int8 by groups. Null for all others.
const FloatKernels* floats_suit(const Matmul& args, Isa isa);

void multiply_floats(const Matmul& args, const Parallel& parallel, const FloatKernels& kernels);

}  // namespace jaxtap
