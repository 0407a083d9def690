// Functions that make scores of logits.
#pragma once

#include "common/lanes_math.h"

namespace jaxtap::router::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

constexpr float kInfinity = __builtin_inff();
constexpr float kEpsilon = 1e-20f;  // beside sums that are divided by, as Transformer Engine has it

JAXTAP_INLINE Floats sigmoid(Floats x) { return 1.0f / (exp(-x) + 1.0f); }

// sqrt(log(1 + e^x)).
JAXTAP_INLINE Floats sqrt_softplus(Floats x) {
  const Floats magnitude = same_bits<Floats>(same_bits<Words>(x) & 0x7fffffffu);
  return square_root(max(all(0.0f), x) + log1p_to_one(exp(-magnitude)));
}

// Its derivative, where y is its value.
JAXTAP_INLINE Floats sqrt_softplus_slope(Floats x, Floats y) {
  return sigmoid(x) / (y * 2.0f + kEpsilon);
}

// In place, of whole vectors: lanes past the end are -infinity, and 0 afterwards.
JAXTAP_INLINE void softmax(float* row, int64_t count) {
  Floats most = all(-kInfinity);
  for (int64_t i = 0; i < count; i += kLanes) most = max(read<Floats>(row + i), most);
  const float top = largest_of(most);
  Floats sums = all(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats e = exp(read<Floats>(row + i) - top);
    write(row + i, e);
    sums += e;
  }
  const float inverse = 1.0f / sum_of(sums);
  for (int64_t i = 0; i < count; i += kLanes) write(row + i, read<Floats>(row + i) * inverse);
}

// Fills the last vector of `count` numbers up.
JAXTAP_INLINE void pad(float* row, int64_t count, float value) {
  const int64_t whole = count / kLanes * kLanes;
  if (whole == count) return;
  write(row + whole, first_n(read<Floats>(row + whole), count - whole, value));
}

}  // namespace
}  // namespace jaxtap::router::JAXTAP_ISA_NAMESPACE
