// The results that are single numbers, or begin as zeros.
#include "cuda/formats.h"
#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {
namespace {

struct Args {
  const float *scale, *amax;
  float *scales, *turned_scales, *updated_amax;
  bool tensor;
};

__global__ void quantize_numbers_kernel(Args args) {
  const float before = *args.amax;
  if (!args.tensor) {
    *args.updated_amax = before;
    return;
  }
  // What the codes' kernel finds is no smaller than 0, and NaN counts in no maximum.
  *args.updated_amax = before > 0.0f ? before : 0.0f;
  const float inverse = 1.0f / *args.scale;
  if (args.scales != nullptr) *args.scales = inverse;
  if (args.turned_scales != nullptr) *args.turned_scales = inverse;
}

void clear(void* scales, int64_t count, Stream stream) {
  if (scales == nullptr || count == 0) return;
  const int code =
      runtime().set_memory(scales, 0, static_cast<size_t>(count) * sizeof(float), stream);
  if (code == 0) return;
  runtime().clear_error();
  runtime().check(code, "clearing memory");
}

}  // namespace

void quantize_numbers(const Quantize& given, Stream stream) {
  Args args = {};
  args.scale = given.scale;
  args.amax = given.amax;
  args.updated_amax = given.updated_amax;
  args.tensor = te::is_tensor(given.scaling);
  if (args.tensor) {
    args.scales = static_cast<float*>(given.scales);
    args.turned_scales = static_cast<float*>(given.turned_scales);
  }
  launch(quantize_numbers_kernel, 1, 1, stream, args);
  if (given.scaling == te::Scaling::kChannel) {
    clear(given.scales, given.rows, stream);
    clear(given.turned_scales, given.cols, stream);
  }
}

}  // namespace jaxtap::cuda
