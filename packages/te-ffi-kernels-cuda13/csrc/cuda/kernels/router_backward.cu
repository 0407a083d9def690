// The gradient of tokens' logits. Each warp has a token, which it reads twice.
#include "cuda/kernels/router.h"
#include "cuda/kernels/router_scores.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

template <class Format>
__global__ void __launch_bounds__(kThreads) router_backward_kernel(RouterBackward args) {
  using Type = typename Format::Type;
  const int64_t token = thread_number() / kWarp;
  if (token >= args.tokens) return;
  const int lane = threadIdx.x % kWarp;
  const router::Options& options = args.options;
  const int64_t count = options.experts;
  const bool bits = options.format == router::MapFormat::kBits;
  const uint8_t* map =
      options.dense ? nullptr : args.map + token * router::map_bytes(options.format, count);
  const float* saved = args.saved + token * count;
  const auto* grad = static_cast<const Type*>(args.grad) + token * count;
  auto* out = static_cast<Type*>(args.out) + token * count;
  const auto chosen = [&](int64_t at) {
    if (options.dense) return true;
    return bits ? (map[at / 8] >> (at % 8) & 1) != 0 : map[at] != 0;
  };

  // Over those chosen: of values, and of values times their gradients.
  float values = 0.0f, products = 0.0f;
  for (int64_t at = lane; at < count; at += kWarp) {
    float y = 0.0f;
    if (chosen(at)) y = options.score == Score::kSqrtSoftplus ? sqrt_softplus(saved[at]) : saved[at];
    values += y;
    products = fmaf(Format::load(grad[at]) * options.scaling, y, products);
  }
  const float dot = sum_of(products);
  // Scores that were divided by their sum: the gradient of one is g / sum - dot / sum^2.
  const bool divided = options.score != Score::kSoftmax && (options.dense || options.topk > 1);
  const float inverse = divided ? 1.0f / (sum_of(values) + kRouterEpsilon) : 1.0f;
  const float common = divided ? dot * inverse * inverse : 0.0f;
  const bool of_all = options.pre_softmax || options.dense;

  for (int64_t at = lane; at < count; at += kWarp) {
    const bool routed = chosen(at);
    const float g = routed ? Format::load(grad[at]) * options.scaling : 0.0f;
    const float x = saved[at];
    float slope;
    if (options.score == Score::kSoftmax) {
      slope = of_all || routed ? (g - dot) * x : 0.0f;
    } else {
      slope = routed ? g * inverse - common : 0.0f;
      slope *= options.score == Score::kSigmoid ? x * (1.0f - x)
                                                : sqrt_softplus_slope(x, sqrt_softplus(x));
    }
    out[at] = Format::store(slope);
  }
}

template <class Format>
void run(const RouterBackward& args, Stream stream) {
  launch(router_backward_kernel<Format>, ceil_of(args.tokens, kThreads / kWarp), kThreads, stream,
         args);
}

}  // namespace

void router_backward(const RouterBackward& args, Stream stream) {
  by_float(args.dtype, [&](auto of) { run<decltype(of)>(args, stream); });
}

}  // namespace jaxtap::cuda
