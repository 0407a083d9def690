// Each warp has a row, in registers: one read and one write of memory.
#include "cuda/kernels/softmax_rows.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

// kValues numbers of the row in each thread.
template <class Format, int kValues>
__global__ void softmax_forward_warp_kernel(SoftmaxArgs args) {
  constexpr int kCount = kWide<Format>, kChunks = kValues / kCount;
  const int64_t row = thread_number() / kWarp;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t columns = args.columns(row);
  const uint8_t* mask = args.mask_of(row);
  const auto* from = static_cast<const typename Format::Type*>(args.x) + row * args.k;
  auto* to = static_cast<typename Format::Type*>(args.out) + row * args.k;
  float values[kChunks][kCount];
  uint32_t gone[kChunks];
  float most = kNone;
  JAXTAP_UNROLL
  for (int c = 0; c < kChunks; ++c) {
    const int64_t at = (static_cast<int64_t>(c) * kWarp + lane) * kCount;
    load<Format>(from + at, args.k - at, args.wide, values[c]);
    gone[c] = left_out<kCount>(mask, at, columns, args.wide);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      values[c][i] *= args.scale;
      if (!(gone[c] >> i & 1)) most = larger(most, values[c][i]);
    }
  }
  most = largest_of(most);
  float sum = 0.0f;
  JAXTAP_UNROLL
  for (int c = 0; c < kChunks; ++c) {
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      values[c][i] = gone[c] >> i & 1 ? 0.0f : expf(values[c][i] - most);
      sum += values[c][i];
    }
  }
  sum = sum_of(sum);
  const float inverse = inverse_of(sum);
  JAXTAP_UNROLL
  for (int c = 0; c < kChunks; ++c) {
    const int64_t at = (static_cast<int64_t>(c) * kWarp + lane) * kCount;
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      values[c][i] = gone[c] >> i & 1 ? 0.0f : values[c][i] * inverse;
    }
    store<Format>(to + at, args.k - at, args.wide, values[c]);
  }
}

template <class Format>
struct Run {
  static void run(const SoftmaxForward& given, Stream stream) {
    const SoftmaxArgs args = softmax_args(given);
    const int64_t blocks = ceil_of(args.rows, kThreads / kWarp);
    if (args.k <= 8 * kWarp) {
      launch(softmax_forward_warp_kernel<Format, 8>, blocks, kThreads, stream, args);
    } else {
      launch(softmax_forward_warp_kernel<Format, 32>, blocks, kThreads, stream, args);
    }
  }
};

}  // namespace

void softmax_forward_of_warps(const SoftmaxForward& args, Stream stream) {
  by_dtype<Run>(args, stream);
}

}  // namespace jaxtap::cuda
