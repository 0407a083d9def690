// Quantization of a matrix, as te/quantize.h has it for the CPU: quantized values, transposed
// quantized values, scales, column sums and the largest magnitude.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"
#include "te/modes.h"

namespace jaxtap::cuda {

// Arrays of the device. Results are nullptr where they aren't wanted.
struct Quantize {
  const void* x = nullptr;  // [rows, cols]; not read where the matrix is computed (quantize_from.h)
  te::Float dtype = te::Float::kF32;  // of x, `out` and `sums`
  int64_t rows = 0, cols = 0;
  te::QType qtype = te::QType::kE4M3;
  te::Scaling scaling = te::Scaling::kDelayedTensor;
  const float* scale = nullptr;  // per tensor: quantized values are of x * scale
  const float* amax = nullptr;   // the largest magnitude so far
  bool wants_absmax = false;     // whether it's updated without scaling

  void* out = nullptr;              // without scaling: the numbers, of a matrix that's computed
  uint8_t* qvalues = nullptr;         // [rows, cols]
  uint8_t* colwise = nullptr;        // by column: [cols, rows], or [rows, cols] with MX
  void* scales = nullptr;           // float[1], float[rows], or e8m0 [rows, cols / 32]
  void* colwise_scales = nullptr;    // float[1], float[cols], or e8m0 [rows / 32, cols]
  void* sums = nullptr;             // over rows, rounded to `dtype`: [cols]
  float* parts = nullptr;           // memory for them: see column_sums.h
  float* updated_amax = nullptr;    // may be where `amax` is
};

// In kernels that follow each other on the stream. Sums are added up in one order, whatever the
// device does.
void quantize(const Quantize& args, Stream stream);

// The kernels. What a slice's quantized values are made with is passed on as the bits of its
// largest magnitude, in the place where its scale will be: there is no memory beside the results.
void quantize_numbers(const Quantize& args, Stream stream);
void quantize_scales(const Quantize& args, Stream stream);

// Current scaling, of what is computed: the scale that goes with the largest magnitude, which
// updates amax, in the place of its bits; and the inverse of the scale, where it's a result.
void quantize_current_scale(const Quantize& args, float* scale, Stream stream);
void quantize_current_inverse(const Quantize& args, const float* scale, Stream stream);

// Zeros for the bits of largest magnitudes.
void quantize_clear(void* numbers, int64_t count, Stream stream);

}  // namespace jaxtap::cuda
