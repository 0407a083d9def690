// Quantization of a matrix in one pass: quantized values, transposed quantized values, scales,
// column sums, and the largest magnitude. The matrix is an array, or is computed on the way
// (Source).
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "te/modes.h"

namespace jaxtap::te {

// What computes a matrix part by part. Several threads call it at once.
class Source {
 public:
  virtual ~Source() = default;

  // Called before parts of a row are asked for, by the thread that asks for all of them; not at all
  // where quantized values by column are wanted, for which rows are cut.
  virtual void begin(int64_t row) const { static_cast<void>(row); }

  // The numbers of rows [row, row + rows) in columns [col, col + cols); out is [rows][stride].
  virtual void load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
                    int64_t stride) const = 0;

  // How many columns are best asked for at once.
  virtual int64_t width() const { return 2048; }
};

struct Quantize {
  const void* x = nullptr;         // [rows, cols]
  const Source* source = nullptr;  // in place of x
  Float dtype = Float::kF32;       // of x, `out` and `sums`
  bool rounded = false;            // whether numbers of a source are rounded to dtype first
  int64_t rows = 0, cols = 0;
  QType qtype = QType::kE4M3;
  Scaling scaling = Scaling::kDelayedTensor;
  float scale = 1.0f;  // per tensor: quantized values are of x * scale

  // Results; nullptr where they aren't wanted. No two overlap.
  void* out = nullptr;        // without scaling: the numbers, [rows, cols]
  uint8_t* qvalues = nullptr;   // [rows, cols]
  uint8_t* colwise = nullptr;  // by column: [cols, rows], or [rows, cols] with MX
  // Per channel and with MX, what quantized values are multiplied with to get x: float[rows],
  // float[cols]; e8m0 [rows, cols / 32], [rows / 32, cols].
  void* scales = nullptr;
  void* colwise_scales = nullptr;
  void* sums = nullptr;  // over rows, summed in float32, rounded to `dtype`: [cols]

  bool wants_absmax = false;
};

// Returns the largest magnitude, not counting NaN, where it's wanted. MX needs columns (for
// quantized values by row) and rows (for quantized values by column) in multiples of 32.
float quantize(const Quantize& args, const Parallel& parallel);

// What numbers are multiplied with so that those of the largest magnitude have the largest
// quantized value; 1 where there is no such factor.
float tensor_scale(float absmax, QType qtype);

}  // namespace jaxtap::te
