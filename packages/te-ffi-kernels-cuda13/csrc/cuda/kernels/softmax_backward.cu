// The gradient of a softmax by rows: those of up to kSoftmaxOfWarp numbers in the registers of a warp
// each, longer ones by a block each, which reads them twice.
#include "cuda/kernels/softmax_rows.h"

namespace jaxtap::cuda {
namespace {

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
__global__ void __launch_bounds__(kBlockThreads) softmax_backward_block_kernel(SoftmaxArgs args) {
  constexpr int kCount = kWide<Format>;
  __shared__ float scratch[kBlockThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int64_t columns = args.columns(row);
  const auto* grad = static_cast<const typename Format::Type*>(args.x) + row * args.k;
  const auto* softmax = static_cast<const typename Format::Type*>(args.softmax) + row * args.k;
  auto* to = static_cast<typename Format::Type*>(args.out) + row * args.k;
  const int64_t step = static_cast<int64_t>(kBlockThreads) * kCount;
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

}  // namespace

void softmax_backward(const SoftmaxBackward& given, Stream stream) {
  by_float(given.shape.dtype, [&](auto of) {
    using Format = decltype(of);
    run_rows(softmax_args(given), softmax_backward_warp_kernel<Format, 8>,
             softmax_backward_warp_kernel<Format, 32>, softmax_backward_block_kernel<Format>,
             stream);
  });
}

}  // namespace jaxtap::cuda
