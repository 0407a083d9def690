// Layer norm and RMS norm of the rows of a matrix, and their gradients.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "norms/kind.h"
#include "te/quantize.h"

namespace jaxtap::norms {

struct Norm {
  Kind kind = Kind::kLayer;
  bool zero_centered = false;  // whether what is multiplied with is 1 + gamma
  float epsilon = 0.0f;
  const void* x = nullptr;  // [rows, cols]
  te::Float dtype = te::Float::kF32;
  const void* gamma = nullptr;  // [cols]
  const void* beta = nullptr;   // [cols]; not read for RMS
  te::Float weights = te::Float::kF32;
  int64_t rows = 0, cols = 0;

  float* mean = nullptr;    // [rows]; nullptr for RMS
  float* rsigma = nullptr;  // [rows]
};

// (x - mean) * rsigma * gamma + beta as numbers that te::quantize asks for. The norm's mean and
// rsigma are set once all of them were asked for. It must live on the thread that made it.
class Normalized : public te::Source {
 public:
  // With `cut` rows are asked for in parts.
  Normalized(const Norm& norm, bool cut, const Parallel& parallel);

  void begin(int64_t row) const override;
  void load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
            int64_t stride) const override;

 private:
  const Norm& norm_;
  const float *gamma_, *beta_;
  struct Rows;
  Rows* rows_;
};

struct Gradient {
  Kind kind = Kind::kLayer;
  bool zero_centered = false;
  const void* dz = nullptr;  // [rows, cols]
  const void* x = nullptr;   // [rows, cols]
  te::Float dtype = te::Float::kF32;
  const float* mean = nullptr;    // [rows]; not read for RMS
  const float* rsigma = nullptr;  // [rows]
  const void* gamma = nullptr;    // [cols]
  te::Float weights = te::Float::kF32;
  int64_t rows = 0, cols = 0;

  void* dx = nullptr;      // [rows, cols], of `dtype`
  void* dgamma = nullptr;  // [cols], of `weights`
  void* dbeta = nullptr;   // [cols], of `weights`; not written for RMS
};

// Sums over rows are in float32, in an order that depends on the shape alone.
void backward(const Gradient& args, const Parallel& parallel);

}  // namespace jaxtap::norms
