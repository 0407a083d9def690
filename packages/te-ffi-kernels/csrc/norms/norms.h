// Layer norm and RMS norm of the rows of a matrix, and their gradients.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "norms/norm.h"
#include "te/quantize.h"

namespace jaxtap::norms {

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

// Sums over rows are in float32, in an order that depends on the shape alone.
void backward(const Gradient& args, const Parallel& parallel);

}  // namespace jaxtap::norms
