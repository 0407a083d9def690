// Each warp has a row, in registers.
#include "cuda/kernels/softmax_rows.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

template <class Format, int kValues>
__global__ void softmax_backward_warp_kernel(SoftmaxArgs args) {
  constexpr int kCount = kWide<Format>, kChunks = kValues / kCount;
  const int64_t row = thread_number() / kWarp;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t columns = args.columns(row);
  const auto* grad = static_cast<const typename Format::Type*>(args.x) + row * args.k;
  const auto* softmax = static_cast<const typename Format::Type*>(args.softmax) + row * args.k;
  auto* to = static_cast<typename Format::Type*>(args.out) + row * args.k;
  float dz[kChunks][kCount], y[kChunks][kCount];
  float sum = 0.0f;
  JAXTAP_UNROLL
  for (int c = 0; c < kChunks; ++c) {
    const int64_t at = (static_cast<int64_t>(c) * kWarp + lane) * kCount;
    load<Format>(grad + at, args.k - at, args.wide, dz[c]);
    load<Format>(softmax + at, args.k - at, args.wide, y[c]);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (at + i >= columns) dz[c][i] = y[c][i] = 0.0f;
      sum += dz[c][i] * y[c][i];
    }
  }
  sum = sum_of(sum);
  JAXTAP_UNROLL
  for (int c = 0; c < kChunks; ++c) {
    const int64_t at = (static_cast<int64_t>(c) * kWarp + lane) * kCount;
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      dz[c][i] = at + i < columns ? (dz[c][i] - sum) * y[c][i] * args.scale : 0.0f;
    }
    store<Format>(to + at, args.k - at, args.wide, dz[c]);
  }
}

template <class Format>
struct Run {
  static void run(const SoftmaxBackward& given, Stream stream) {
    const SoftmaxArgs args = softmax_args(given);
    const int64_t blocks = ceil_of(args.rows, kThreads / kWarp);
    if (args.k <= 8 * kWarp) {
      launch(softmax_backward_warp_kernel<Format, 8>, blocks, kThreads, stream, args);
    } else {
      launch(softmax_backward_warp_kernel<Format, 32>, blocks, kThreads, stream, args);
    }
  }
};

}  // namespace

void softmax_backward_of_warps(const SoftmaxBackward& args, Stream stream) {
  by_dtype<Run>(args, stream);
}

}  // namespace jaxtap::cuda
