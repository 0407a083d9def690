// Each block has a row, of any length, which it reads twice.
#include "cuda/kernels/softmax_rows.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 512;

template <class Format>
__global__ void __launch_bounds__(kThreads) softmax_backward_block_kernel(SoftmaxArgs args) {
  constexpr int kCount = kWide<Format>;
  __shared__ float scratch[kThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int64_t columns = args.columns(row);
  const auto* grad = static_cast<const typename Format::Type*>(args.x) + row * args.k;
  const auto* softmax = static_cast<const typename Format::Type*>(args.softmax) + row * args.k;
  auto* to = static_cast<typename Format::Type*>(args.out) + row * args.k;
  const int64_t step = static_cast<int64_t>(kThreads) * kCount;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kCount;
  float sum = 0.0f;
  for (int64_t at = first; at < columns; at += step) {
    float dz[kCount], y[kCount];
    load<Format>(grad + at, args.k - at, args.wide, dz);
    load<Format>(softmax + at, args.k - at, args.wide, y);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (at + i < columns) sum += dz[i] * y[i];
    }
  }
  sum = sum_of_block(sum, scratch);
  for (int64_t at = first; at < args.k; at += step) {
    float dz[kCount], y[kCount];
    load<Format>(grad + at, args.k - at, args.wide, dz);
    load<Format>(softmax + at, args.k - at, args.wide, y);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      dz[i] = at + i < columns ? (dz[i] - sum) * y[i] * args.scale : 0.0f;
    }
    store<Format>(to + at, args.k - at, args.wide, dz);
  }
}

template <class Format>
struct Run {
  static void run(const SoftmaxBackward& given, Stream stream) {
    const SoftmaxArgs args = softmax_args(given);
    launch(softmax_backward_block_kernel<Format>, args.rows, kThreads, stream, args);
  }
};

}  // namespace

void softmax_backward_of_blocks(const SoftmaxBackward& args, Stream stream) {
  by_dtype<Run>(args, stream);
}

}  // namespace jaxtap::cuda
