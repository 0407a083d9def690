// Each block has a row, of any length: its maximum and its sum in one pass, and a second one, which
// reads what the caches still have, to write.
#include "cuda/kernels/softmax_rows.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 512;

template <class Format>
__global__ void __launch_bounds__(kThreads) softmax_forward_block_kernel(SoftmaxArgs args) {
  constexpr int kCount = kWide<Format>;
  __shared__ float scratch[kThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int64_t columns = args.columns(row);
  const uint8_t* mask = args.mask_of(row);
  const auto* from = static_cast<const typename Format::Type*>(args.x) + row * args.k;
  auto* to = static_cast<typename Format::Type*>(args.out) + row * args.k;
  const int64_t step = static_cast<int64_t>(kThreads) * kCount;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kCount;
  float most = kNone, sum = 0.0f;
  for (int64_t at = first; at < columns; at += step) {
    float x[kCount];
    load<Format>(from + at, args.k - at, args.wide, x);
    const uint32_t gone = left_out<kCount>(mask, at, columns, args.wide);
    float here = most;
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      x[i] *= args.scale;
      if (!(gone >> i & 1)) here = larger(here, x[i]);
    }
    // As long as there is nothing but -infinity, terms are zero, not exp(-infinity + infinity).
    const float base = here == kNone ? 0.0f : here;
    if (here > most) sum *= expf(most - base);
    most = here;
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (!(gone >> i & 1)) sum += expf(x[i] - base);
    }
  }
  const float largest = largest_of_block(most, scratch);
  if (most != kNone) sum *= expf(most - largest);
  sum = sum_of_block(sum, scratch);
  // Where the largest number is -infinity, that of the row is NaN, as 0 times infinity.
  const float inverse = 1.0f / sum;
  for (int64_t at = first; at < args.k; at += step) {
    float x[kCount] = {};
    const uint32_t gone = left_out<kCount>(mask, at, columns, args.wide);
    if (at < columns) load<Format>(from + at, args.k - at, args.wide, x);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      x[i] = gone >> i & 1 ? 0.0f : expf(x[i] * args.scale - largest) * inverse;
    }
    store<Format>(to + at, args.k - at, args.wide, x);
  }
}

template <class Format>
struct Run {
  static void run(const SoftmaxForward& given, Stream stream) {
    const SoftmaxArgs args = softmax_args(given);
    launch(softmax_forward_block_kernel<Format>, args.rows, kThreads, stream, args);
  }
};

}  // namespace

void softmax_forward_of_blocks(const SoftmaxForward& args, Stream stream) {
  by_dtype<Run>(args, stream);
}

}  // namespace jaxtap::cuda
