// Results beside the quantized values: single numbers, and the scales of rows and columns.
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

struct Numbers {
  const float *scale, *amax;
  float *scales, *colwise_scales, *updated_amax;
  bool updates;
};

__global__ void quantize_numbers_kernel(Numbers args) {
  const float before = *args.amax;
  // What other kernels find is no smaller than 0, and NaN counts in no maximum.
  *args.updated_amax = !args.updates || before > 0.0f ? before : 0.0f;
  if (args.scale == nullptr) return;
  const float inverse = 1.0f / *args.scale;
  if (args.scales != nullptr) *args.scales = inverse;
  if (args.colwise_scales != nullptr) *args.colwise_scales = inverse;
}

struct Current {
  float* scale;  // bits of the largest magnitude, before
  const float* amax;
  float *scales, *colwise_scales, *updated_amax;
  QType qtype;
};

__global__ void quantize_current_scale_kernel(Current args) {
  constexpr float kMost = 0x1.fffffep127f;
  const float found = *args.scale, before = *args.amax;
  *args.updated_amax = before >= found ? before : found;  // NaN is no maximum
  const float scale = te::largest(args.qtype) / found;
  const bool has = found > 0.0f && found < __builtin_inff();
  *args.scale = !has ? 1.0f : scale < kMost ? scale : kMost;
}

__global__ void quantize_current_inverse_kernel(Current args) {
  const float inverse = 1.0f / *args.scale;  // which may be one of those
  if (args.scales != nullptr) *args.scales = inverse;
  if (args.colwise_scales != nullptr) *args.colwise_scales = inverse;
}

constexpr int kThreads = 256;

struct Scales {
  float* scales;
  int64_t count;
  QType qtype;
};

__global__ void quantize_scales_kernel(Scales args) {
  const int64_t at = thread_number();
  if (at >= args.count) return;
  const int absmax = reinterpret_cast<const int*>(args.scales)[at];
  args.scales[at] = 1.0f / channel_scale(absmax, args.qtype);
}

void scales_of(void* scales, int64_t count, QType qtype, Stream stream) {
  if (scales == nullptr) return;
  launch(quantize_scales_kernel, ceil_of(count, kThreads), kThreads, stream,
         Scales{static_cast<float*>(scales), count, qtype});
}

}  // namespace

void quantize_clear(void* numbers, int64_t count, Stream stream) {
  set_zero(numbers, count * static_cast<int64_t>(sizeof(float)), stream);
}

void quantize_numbers(const Quantize& given, Stream stream) {
  Numbers args = {};
  args.amax = given.amax;
  args.updated_amax = given.updated_amax;
  const bool tensor = te::is_tensor(given.scaling);
  args.updates = tensor || given.wants_absmax;
  if (tensor) {
    args.scale = given.scale;
    args.scales = static_cast<float*>(given.scales);
    args.colwise_scales = static_cast<float*>(given.colwise_scales);
  }
  launch(quantize_numbers_kernel, 1, 1, stream, args);
  if (given.scaling == te::Scaling::kChannel) {
    quantize_clear(given.scales, given.rows, stream);
    quantize_clear(given.colwise_scales, given.cols, stream);
  }
}

void quantize_current_scale(const Quantize& given, float* scale, Stream stream) {
  Current args = {};
  args.scale = scale;
  args.amax = given.amax;
  args.updated_amax = given.updated_amax;
  args.qtype = given.qtype;
  launch(quantize_current_scale_kernel, 1, 1, stream, args);
}

void quantize_current_inverse(const Quantize& given, const float* scale, Stream stream) {
  Current args = {};
  args.scale = const_cast<float*>(scale);
  args.scales = static_cast<float*>(given.scales);
  args.colwise_scales = static_cast<float*>(given.colwise_scales);
  launch(quantize_current_inverse_kernel, 1, 1, stream, args);
}

void quantize_scales(const Quantize& args, Stream stream) {
  scales_of(args.scales, args.rows, args.qtype, stream);
  scales_of(args.colwise_scales, args.cols, args.qtype, stream);
}

}  // namespace jaxtap::cuda
