// A softmax by rows: those of up to kSoftmaxOfWarp numbers in the registers of a warp each, with one
// read and one write of memory; longer ones by a block each, which finds their maximum and sum in one
// pass, and writes in a second one, which reads what the caches still have.
#include "cuda/kernels/softmax_rows.h"

namespace jaxtap::cuda {
namespace {

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
__global__ void __launch_bounds__(kBlockThreads) softmax_forward_block_kernel(SoftmaxArgs args) {
  constexpr int kCount = kWide<Format>;
  __shared__ float scratch[kBlockThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int64_t columns = args.columns(row);
  const uint8_t* mask = args.mask_of(row);
  const auto* from = static_cast<const typename Format::Type*>(args.x) + row * args.k;
  auto* to = static_cast<typename Format::Type*>(args.out) + row * args.k;
  const int64_t step = static_cast<int64_t>(kBlockThreads) * kCount;
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

}  // namespace

void softmax_forward(const SoftmaxForward& given, Stream stream) {
  by_float(given.shape.dtype, [&](auto of) {
    using Format = decltype(of);
    run_rows(softmax_args(given), softmax_forward_warp_kernel<Format, 8>,
             softmax_forward_warp_kernel<Format, 32>, softmax_forward_block_kernel<Format>,
             stream);
  });
}

}  // namespace jaxtap::cuda
