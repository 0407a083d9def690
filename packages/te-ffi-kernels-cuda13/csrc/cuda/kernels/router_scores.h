// Functions that make scores of logits, with the CPU's bits where it multiplies and adds in one
// rounding: what is equal there is equal here, and the choice is the same.
#pragma once

#include "common/vmath.h"
#include "cuda/formats.h"
#include "router/options.h"

namespace jaxtap::cuda {
namespace {

using router::Score;

constexpr float kBelowAll = -__builtin_inff();
constexpr float kRouterEpsilon = 1e-20f;  // beside sums that are divided by

JAXTAP_DEVICE float router_sigmoid(float x) { return 1.0f / (vexp(-x) + 1.0f); }

// sqrt(log(1 + e^x)). NaN stays NaN.
JAXTAP_DEVICE float sqrt_softplus(float x) {
  const float positive = x > 0.0f ? x : 0.0f;
  return sqrtf(positive + vlog1p_to_one(vexp(-fabsf(x))));
}

// Its derivative, where y is its value.
JAXTAP_DEVICE float sqrt_softplus_slope(float x, float y) {
  return router_sigmoid(x) / (y * 2.0f + kRouterEpsilon);
}

}  // namespace
}  // namespace jaxtap::cuda
