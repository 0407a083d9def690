// Current scaling: single numbers.
#include "cuda/formats.h"
#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {
namespace {

struct Args {
  float* scale;  // bits of the largest magnitude, before
  const float* amax;
  float *scales, *colwise_scales, *updated_amax;
  QType qtype;
};

__global__ void quantize_current_scale_kernel(Args args) {
  constexpr float kMost = 0x1.fffffep127f;
  const float found = *args.scale, before = *args.amax;
  *args.updated_amax = before >= found ? before : found;  // NaN is no maximum
  const float scale = te::largest(args.qtype) / found;
  const bool has = found > 0.0f && found < __builtin_inff();
  *args.scale = !has ? 1.0f : scale < kMost ? scale : kMost;
}

__global__ void quantize_current_inverse_kernel(Args args) {
  const float inverse = 1.0f / *args.scale;  // which may be one of those
  if (args.scales != nullptr) *args.scales = inverse;
  if (args.colwise_scales != nullptr) *args.colwise_scales = inverse;
}

}  // namespace

void quantize_current_scale(const Quantize& given, float* scale, Stream stream) {
  Args args = {};
  args.scale = scale;
  args.amax = given.amax;
  args.updated_amax = given.updated_amax;
  args.qtype = given.qtype;
  launch(quantize_current_scale_kernel, 1, 1, stream, args);
}

void quantize_current_inverse(const Quantize& given, const float* scale, Stream stream) {
  Args args = {};
  args.scale = const_cast<float*>(scale);
  args.scales = static_cast<float*>(given.scales);
  args.colwise_scales = static_cast<float*>(given.colwise_scales);
  launch(quantize_current_inverse_kernel, 1, 1, stream, args);
}

}  // namespace jaxtap::cuda
