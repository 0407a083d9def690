// What an instruction set provides to the engine: functions over blocks of rows and panels.
//
// A "digit row" is one int8 digit of one row of x: row r is the digit rows r * digits + p. Two of a
// row may be one of int16 in their place: four numbers lie in the order 0, 2, 1, 3, for vpdpwssd and
// what nibbles expand to in few steps. All instruction sets give the same bits: integer sums are
// exact, and float operations are the same in the same order, none of them fused.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/forward.h"
#include "common/packed.h"

namespace jaxtap {

// Where the one run of a matmul begins.
inline constexpr int64_t kOneRun[1] = {0};

// Matmuls of digit rows with consecutive panels. A segment is a range of K with integer sums: a
// group of the weight, or all of K. `k` and `segment_k` count padded rows of K: multiples of 8, or of 4
// for a run of a convolution.
struct Tile {
  const int8_t* x;  // [rows, x_stride]
  int64_t x_stride;
  int64_t rows;
  // [rows, offsets_stride]: zero point * sum of x over each segment. Null: quantized values are
  // signed.
  const int32_t* offsets;
  int64_t offsets_stride;

  const uint8_t* qvalues;  // quantized values of the first panel
  int64_t qvalues_stride;  // bytes from panel to panel
  int64_t panels;
  int64_t k;
  // Exact: K is `runs` times `k`, and these are where each begins in a row of x, in bytes from its
  // start: what a convolution's window covers of each line of its input. A matmul has one.
  int64_t runs = 1;
  const int64_t* x_runs = kOneRun;

  // Exact: int32 sums of one segment. The offsets are subtracted where `first`, else the sums are
  // added to what `sums` holds.
  int32_t* sums;  // [rows, sums_stride]; 16 columns for each panel
  int64_t sums_stride;
  bool first;
  // Not null: the sums are those of all rows of K, and are rescaled and stored by this.
  const struct Epilogue* epilogue;

  // Scaled: sums over segments of (float32 sum of products - offset) * scale of x * scale. Of two
  // digits: the same of two digit rows put together, sum of digit 1 * 256 + sum of digit 0, in int32
  // where that fits, else in float32.
  int64_t segment_k;  // the last segment may be shorter
  const uint8_t* scales;  // float32[16] of the first panel and segment, unaligned
  int64_t scales_stride;  // bytes from panel to panel
  int64_t scales_step;    // bytes from segment to segment
  bool fits_int32;
  const float* x_scales;  // [rows of x, offsets_stride]; null where a row has one for all segments
  float* totals;          // [rows, sums_stride]; of two digits: [rows / 2, sums_stride]
};

// One row of x to digit rows.
struct Quantize {
  const uint8_t* x;  // [k] of x_dtype, unaligned
  DType x_dtype;
  int64_t k;
  int64_t padded_k;
  int digits;
  int64_t segment_k;
  int32_t zero_point;
  bool int16_digits;  // two digits as one of int16, without offsets
  int8_t* out;  // [digits, out_stride]; zero from k to padded_k
  int64_t out_stride;
  int32_t* offsets;  // [digits, offsets_stride]
  int64_t offsets_stride;
  float* scale;  // of the row, or of each segment
  const float* given;  // with one digit: the scale to use; null: that of the largest magnitude
  bool bounded;        // x is finite, and nowhere beyond 127 times the given scale
};

// One row of x times signs, then times Hadamard's matrix of each block.
struct Rotate {
  const uint8_t* x;  // [k] of x_dtype, unaligned
  DType x_dtype;
  int64_t k;
  const int8_t* signs;  // [k]
  int64_t block;        // a power of two from 2 that divides k
  float factor;         // of the result: 1 / sqrt(block)
  float* out;           // [k, rounded up to a multiple of 16]
};

// Where rows of y go, and what is added to them on the way: see `Matmul`.
struct Output {
  uint8_t* y;  // of the first row and column, unaligned, as are the other two
  DType dtype;
  int64_t stride;  // bytes from row to row, of the residual too
  int64_t columns;
  const uint8_t* bias;      // of the first column, or null
  const uint8_t* residual;  // of the first row and column, or null
  // Between which the sums are cut, the last of all; a NaN stays.
  bool clamps = false;
  float least = 0.0f, most = 0.0f;
  // Whether whole lines of float32 may go past the caches, where nothing is added. The caller fences
  // at the end of a task.
  bool past_caches = false;
};

// Matmuls of a few rows with one panel of 4 bits, to rows of y, part by part of its numbers. The
// digits of a row are put together before they are rescaled, in int32 where they are two and that is
// `fits_int32`:
//   total += (sum of digit 2 * 65536 + sum of digit 1 * 256 + sum of digit 0) [* scale of x] * scale
//   y = total [* scale of the row]
struct Stream {
  const int8_t* x;  // digit rows [rows * digits, x_stride]
  int64_t x_stride;
  int64_t rows;
  int digits;
  const int32_t* offsets;  // [rows * digits, offsets_stride], as those of a tile
  int64_t offsets_stride;
  const float* x_scales;  // null, or [rows, x_scales_stride]
  int64_t x_scales_stride;
  int64_t x_scales_step;  // from segment to segment
  const float* row_scales;  // [rows], or null

  const uint8_t* panel;  // unaligned
  const PanelLayout* layout;
  bool fits_int32;
  bool grouped;  // scales precede each segment, and not the first alone
  int64_t k;
  int64_t segment_k;
  Output out;
};

// Sums of digit rows to rows of y.
struct Epilogue {
  const int32_t* sums;  // [rows * digits, stride], or null
  const float* totals;  // the same, where `sums` is null
  int64_t stride;
  int64_t rows;
  int digits;
  const float* row_scales;  // null: 1
  const uint8_t* scales;    // float32[16] of each panel, unaligned; null: 1
  int64_t scales_stride;
  Output out;
};

// A panel of 4 bits to what two of 8 bits hold, with the table's zero point or as signed bytes, or
// to signed numbers of 16 bits: [2, groups * parts * group / 2, 16, 2] of those. The parts of a
// table's numbers are groups that follow each other.
struct Expand {
  const uint8_t* panel;  // unaligned
  const PanelLayout* layout;
  uint8_t* qvalues;  // [2, groups * parts * group / 4, 16, 4]
  float* scales;     // [2, groups * parts, 16]
};

// Digit rows up to which panels of 4 bits are multiplied as they lie.
constexpr int64_t kStreamRows = 12;

struct Kernels {
  int64_t block_panels;  // panels that are multiplied by all rows before the next ones are
  int64_t block_k;       // rows of K too, for exact sums; a multiple of 64
  int64_t task_steps;    // of multiplying 64 bytes, that are worth a task: about 10 microseconds
  int64_t least_rows;    // digit rows from which these kernels are worthwhile
  bool expands_signed;   // what `expand_panel` gives
  bool signed_sums;      // quantized values less the zero point are multiplied, and no offsets taken
  void (*exact8)(const Tile&);
  void (*scaled8)(const Tile&);
  void (*two_digits8)(const Tile&);
  void (*two_digits16)(const Tile&);  // wide rows and panels of 16 bits; or null
  void (*expand_panel)(const Expand&);
  void (*expand_panel16)(const Expand&);  // null where `two_digits16` is
  void (*stream)(const Stream&);  // null where least_rows is beyond kStreamRows
  void (*rotate)(const Rotate&);
  void (*quantize)(const Quantize&);
  void (*quantize_pairs)(const Quantize&);  // two digits, with a scale for each segment
  void (*epilogue)(const Epilogue&);
  void (*release)();  // at the end of a task, or null
};

// Gives the kernels' registers back, also when a panel turns out to be corrupted.
struct Release {
  void (*release)();
  ~Release() {
    if (release != nullptr) release();
  }
};

// Longest range of K with exact sums: |value of x| <= 128 by |value of w| <= 128 stays in int32.
constexpr int64_t kExactK = (int64_t{1} << 17) - 64;

// Sums of all `k` rows of K, in parts that fit the caches, to rows of y.
inline void multiply_exactly(const Kernels& kernels, Tile t, int64_t k, const Epilogue& epilogue) {
  for (int64_t i = 0; i < k; i += kernels.block_k) {
    t.k = std::min(kernels.block_k, k - i);
    t.first = i == 0;
    if (epilogue.digits == 1 && i + t.k == k) t.epilogue = &epilogue;
    kernels.exact8(t);
    t.x += t.k;
    t.qvalues += t.k * 16;
  }
  if (t.epilogue == nullptr) kernels.epilogue(epilogue);
}

const Kernels& kernels_of(Isa isa);
// Those of it, or of the one below that suits so few digit rows.
const Kernels& kernels_of(Isa isa, int64_t digit_rows);
const Kernels& generic_kernels();
#if defined(__aarch64__)
const Kernels& neon_kernels();
const Kernels& neon_dot_kernels();
const Kernels& neon_i8mm_kernels();
#elif defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx_vnni_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
#endif

}  // namespace jaxtap
