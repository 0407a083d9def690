// The activations and their derivatives, as the CPU's kernels have them (activations/isa).
//
// Where a sigmoid is 0 the result is 0, which is the limit for x to -inf. NaN stays NaN.
#pragma once

#include "activations/table.h"
#include "cuda/device.h"

namespace jaxtap::cuda {
namespace {

using activations::Function;
using activations::Params;

// What a function gives: its value, and its derivative.
struct Point {
  float value, slope;
};

// 1 / (1 + e^-x), and what it lacks to 1.
struct Sigmoid {
  float value, rest;
};

JAXTAP_DEVICE Sigmoid sigmoid(float x) {
  const float e = expf(-x);
  const float value = 1.0f / (1.0f + e);
  return {value, e < 1e30f ? e * value : 1.0f};
}

JAXTAP_DEVICE float times(float x, float gate) { return gate == 0.0f ? 0.0f : x * gate; }

// x * sigmoid(u), where u' = slope.
JAXTAP_DEVICE Point swish(float x, float u, float slope) {
  const Sigmoid s = sigmoid(u);
  return {times(x, s.value), s.value + times(x * slope, s.value * s.rest)};
}

template <Function kFunction>
JAXTAP_DEVICE Point point(float x, const Params& params) {
  if constexpr (kFunction == Function::kGelu) {
    // 1 + tanh(v) is 2 sigmoid(2 v), where v = sqrt(2 / pi) (x + 0.044715 x^3).
    constexpr float kRoot = 1.5957691216f, kCube = 0.0713548163f;
    const float square = x * x;
    return swish(x, x * fmaf(kCube, square, kRoot), fmaf(3.0f * kCube, square, kRoot));
  } else if constexpr (kFunction == Function::kSigmoid) {
    const Sigmoid s = sigmoid(x);
    return {s.value, s.value * s.rest};
  } else if constexpr (kFunction == Function::kSilu) {
    return swish(x, x, 1.0f);
  } else if constexpr (kFunction == Function::kRelu) {
    return {x <= 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (kFunction == Function::kQuickGelu) {
    return swish(x, 1.702f * x, 1.702f);
  } else if constexpr (kFunction == Function::kSquaredRelu) {
    const float part = x <= 0.0f ? 0.0f : x;
    return {part * part, 2.0f * part};
  } else {
    const float cut = x > params.limit ? params.limit : x;
    const Point at = swish(cut, params.alpha * cut, params.alpha);
    return {at.value, x > params.limit ? 0.0f : at.slope};
  }
}

// What f(a) is multiplied with, and whether it follows b.
template <Function kFunction>
JAXTAP_DEVICE Point gate(float b, const Params& params) {
  if constexpr (kFunction == Function::kClampedSilu) {
    const float low = b < -params.limit ? -params.limit : b;
    const float cut = low > params.limit ? params.limit : low;
    return {cut + params.offset, cut == b ? 1.0f : 0.0f};
  } else {
    return {b, 1.0f};
  }
}

template <Function kFunction>
struct Constant {
  static constexpr Function value = kFunction;
};

// Calls body(a constant), so that what loops over numbers is chosen once for all of them.
template <class Body>
JAXTAP_DEVICE void by_function(Function function, Body&& body) {
  switch (function) {
    case Function::kGelu: return body(Constant<Function::kGelu>{});
    case Function::kSigmoid: return body(Constant<Function::kSigmoid>{});
    case Function::kSilu: return body(Constant<Function::kSilu>{});
    case Function::kRelu: return body(Constant<Function::kRelu>{});
    case Function::kQuickGelu: return body(Constant<Function::kQuickGelu>{});
    case Function::kSquaredRelu: return body(Constant<Function::kSquaredRelu>{});
    case Function::kClampedSilu: return body(Constant<Function::kClampedSilu>{});
  }
  __builtin_unreachable();
}

}  // namespace
}  // namespace jaxtap::cuda
