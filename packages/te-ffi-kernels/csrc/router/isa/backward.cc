// The gradient of a token's logits.

#include "router/isa/scores.h"
#include "router/isa/table.h"

namespace jaxtap::router::JAXTAP_ISA_NAMESPACE {
namespace {

// Of the score function, of saved numbers.
template <Score kScore>
JAXTAP_INLINE Floats value(Floats saved) {
  if constexpr (kScore == Score::kSqrtSoftplus) return sqrt_softplus(saved);
  return saved;
}

template <class Format, Score kScore>
void backward(const Options& options, const uint8_t* map, const float* saved, const void* grads,
              void* to) {
  using Type = typename Format::Type;
  const auto* grad = static_cast<const Type*>(grads);
  auto* out = static_cast<Type*>(to);
  const int64_t count = options.experts;
  const float scaling = options.scaling;
  const auto chosen = [&](int64_t i, auto part) {
    return map == nullptr ? Ints{} - 1 : widen(read<Bytes>(map + i, part)) != 0;
  };
  const Floats zero = all(0.0f);
  // Over those chosen: of values, and of values times their gradients.
  Floats values = zero, products = zero;
  over(count, [&](int64_t i, auto part) {
    const Ints routed = chosen(i, part);
    const Floats y = routed ? first_n(value<kScore>(load<F32>(saved + i, part)), part, 0.0f) : zero;
    values += y;
    products = fma(load<Format>(grad + i, part) * scaling, y, products);
  });
  const float dot = sum_of(products);
  // Scores that were divided by their sum: the gradient of one is g / sum - dot / sum^2.
  const bool divided = kScore != Score::kSoftmax && (options.dense || options.topk > 1);
  const float inverse = divided ? 1.0f / (sum_of(values) + kEpsilon) : 1.0f;
  const float common = divided ? dot * inverse * inverse : 0.0f;
  const bool of_all = options.pre_softmax || options.dense;

  over(count, [&](int64_t i, auto part) {
    const Ints routed = chosen(i, part);
    const Floats g = routed ? load<Format>(grad + i, part) * scaling : zero;
    const Floats x = load<F32>(saved + i, part);
    Floats slope;
    if constexpr (kScore == Score::kSoftmax) {
      slope = (g - dot) * x;
      if (!of_all) slope = routed ? slope : zero;
    } else {
      slope = routed ? g * inverse - common : zero;
      if constexpr (kScore == Score::kSigmoid) {
        slope = slope * x * (1.0f - x);
      } else {
        slope *= sqrt_softplus_slope(x, sqrt_softplus(x));
      }
    }
    store<Format>(out + i, slope, part);
  });
}

template <class Format>
void set(Table& table, int format) {
  table.backward[format][0] = backward<Format, Score::kSigmoid>;
  table.backward[format][1] = backward<Format, Score::kSoftmax>;
  table.backward[format][2] = backward<Format, Score::kSqrtSoftplus>;
}

}  // namespace

void set_backward(Table& table) {
  set<F32>(table, 0);
  set<BF16>(table, 1);
  set<F16>(table, 2);
}

}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
