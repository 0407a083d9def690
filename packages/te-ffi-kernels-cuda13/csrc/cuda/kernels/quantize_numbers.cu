// The results that are single numbers, or begin as zeros.
#include "cuda/formats.h"
#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {
namespace {

struct Args {
  const float *scale, *amax;
  float *scales, *colwise_scales, *updated_amax;
  bool updates;
};

__global__ void quantize_numbers_kernel(Args args) {
  const float before = *args.amax;
  // What other kernels find is no smaller than 0, and NaN counts in no maximum.
  *args.updated_amax = !args.updates || before > 0.0f ? before : 0.0f;
  if (args.scale == nullptr) return;
  const float inverse = 1.0f / *args.scale;
  if (args.scales != nullptr) *args.scales = inverse;
  if (args.colwise_scales != nullptr) *args.colwise_scales = inverse;
}

}  // namespace

void quantize_clear(void* numbers, int64_t count, Stream stream) {
  if (numbers == nullptr || count == 0) return;
  const int code =
      runtime().set_memory(numbers, 0, static_cast<size_t>(count) * sizeof(float), stream);
  if (code == 0) return;
  runtime().clear_error();
  runtime().check(code, "clearing memory");
}

void quantize_numbers(const Quantize& given, Stream stream) {
  Args args = {};
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

}  // namespace jaxtap::cuda
