// Rows to tokens, and the gradient of that. A block has a token.
#include "cuda/kernels/permutation_token.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

struct SumArgs : Unpermute {
  bool wide;  // rows may be read and written in vectors of 16 bytes
};

struct GradientArgs : UnpermuteGradient {
  bool wide;
};

template <class Format>
__global__ void __launch_bounds__(kThreads) unpermute_kernel(SumArgs args) {
  constexpr int kPart = kWide<Format>;
  using Number = typename Format::Type;
  const int64_t token = blockIdx.x, experts = args.map.experts;
  const auto* x = static_cast<const Number*>(args.x);
  auto* out = static_cast<Number*>(args.out) + token * args.cols;
  for (int64_t col = threadIdx.x * kPart; col < args.cols; col += kThreads * kPart) {
    float sums[kPart] = {};
    each_row(args.map, token, [&](int64_t row, int64_t expert) {
      float numbers[kPart];
      load<Format>(x + row * args.cols + col, args.cols - col, args.wide, numbers);
      const float factor =
          args.given_factors == nullptr
              ? 1.0f
              : number_at(args.given_factors, args.factors_dtype, token * experts + expert);
      JAXTAP_UNROLL
      for (int i = 0; i < kPart; ++i) sums[i] += numbers[i] * factor;
    });
    store<Format>(out + col, args.cols - col, args.wide, sums);
  }
  if (args.permuted_probs == nullptr || threadIdx.x != 0) return;
  each_row(args.map, token, [&](int64_t row, int64_t expert) {
    copy_number(args.permuted_probs, row, args.probs, token * experts + expert, args.prob_bytes);
  });
}

template <class Format>
__global__ void __launch_bounds__(kThreads) unpermute_gradient_kernel(GradientArgs args) {
  constexpr int kPart = kWide<Format>;
  using Number = typename Format::Type;
  __shared__ float scratch[kThreads / kWarp];
  const int64_t token = blockIdx.x;
  const auto* grad = static_cast<const Number*>(args.grad) + token * args.cols;
  each_row(args.map, token, [&](int64_t row, int64_t expert) {
    const auto* x = static_cast<const Number*>(args.x) + row * args.cols;
    auto* out = static_cast<Number*>(args.x_grad) + row * args.cols;
    const int64_t place = token * args.map.experts + expert;
    const float factor = number_at(args.given_factors, args.factors_dtype, place);
    float dot = 0.0f;
    for (int64_t col = threadIdx.x * kPart; col < args.cols; col += kThreads * kPart) {
      float grads[kPart], numbers[kPart];
      load<Format>(grad + col, args.cols - col, args.wide, grads);
      load<Format>(x + col, args.cols - col, args.wide, numbers);
      JAXTAP_UNROLL
      for (int i = 0; i < kPart; ++i) {
        dot += grads[i] * numbers[i];
        grads[i] *= factor;
      }
      store<Format>(out + col, args.cols - col, args.wide, grads);
    }
    dot = sum_of_block(dot, scratch);
    if (threadIdx.x == 0) store_one(args.factors_dtype, args.given_factors_grad, place, dot);
  });
}

template <class... Pointers>
bool rows_are_wide(te::Float dtype, int64_t cols, Pointers... pointers) {
  const int64_t bytes = cols * (dtype == te::Float::kF32 ? 4 : 2);
  return bytes % 16 == 0 && aligned(16, static_cast<const char*>(pointers)...);
}

}  // namespace

void unpermute(const Unpermute& given, Stream stream) {
  SumArgs args = {};
  static_cast<Unpermute&>(args) = given;
  args.wide = rows_are_wide(args.dtype, args.cols, args.x, args.out);
  const auto with = [&](auto kernel) {
    launch(kernel, args.map.tokens, kThreads, stream, args);
  };
  by_float(args.dtype, [&](auto of) { with(unpermute_kernel<decltype(of)>); });
}

void unpermute_gradient(const UnpermuteGradient& given, Stream stream) {
  GradientArgs args = {};
  static_cast<UnpermuteGradient&>(args) = given;
  args.wide = rows_are_wide(args.dtype, args.cols, args.grad, args.x, args.x_grad);
  const auto with = [&](auto kernel) {
    launch(kernel, args.map.tokens, kThreads, stream, args);
  };
  by_float(args.dtype, [&](auto of) { with(unpermute_gradient_kernel<decltype(of)>); });
}

}  // namespace jaxtap::cuda
