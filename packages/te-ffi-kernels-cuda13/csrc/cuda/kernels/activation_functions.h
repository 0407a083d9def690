// The activations and their derivatives, as the CPU's kernels have them (activations/isa).
//
// Where a sigmoid is 0 the result is 0, which is the limit for x to -inf. NaN stays NaN.
#pragma once

#include <limits>
#include <type_traits>

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

// What functions differ in. They are of two kinds, so that kernels have code for two and not for each:
//   those of a sigmoid      x * sigmoid(u), or the sigmoid alone, where u = x (bend x^2 + tilt) and x
//                           is cut at `limit`
//   those that are cut at 0  max(x, 0), or its square
struct Curve {
  bool rectified, squared;          // max(x, 0)
  bool alone;                       // the sigmoid
  float tilt, bend, limit;
  bool cuts_gate;  // what is multiplied with f(a) is cut, and moved by `offset`
  float gate_limit, offset;
};

inline Curve curve_of(Function function, const Params& params) {
  Curve curve = {};
  curve.tilt = 1.0f;
  curve.limit = std::numeric_limits<float>::infinity();
  switch (function) {
    case Function::kGelu:
      // 1 + tanh(v) is 2 sigmoid(2 v), where v = sqrt(2 / pi) (x + 0.044715 x^3).
      curve.tilt = 1.5957691216f;
      curve.bend = 0.0713548163f;
      break;
    case Function::kSigmoid: curve.alone = true; break;
    case Function::kSilu: break;
    case Function::kRelu: curve.rectified = true; break;
    case Function::kQuickGelu: curve.tilt = 1.702f; break;
    case Function::kSquaredRelu: curve.rectified = curve.squared = true; break;
    case Function::kClampedSilu:
      curve.tilt = params.alpha;
      curve.limit = curve.gate_limit = params.limit;
      curve.cuts_gate = true;
      curve.offset = params.offset;
      break;
  }
  return curve;
}

template <bool kRectified>
JAXTAP_DEVICE Point point(float x, const Curve& curve) {
  if constexpr (kRectified) {
    const float part = x <= 0.0f ? 0.0f : x;
    if (curve.squared) return {part * part, 2.0f * part};
    return {part, x > 0.0f ? 1.0f : 0.0f};
  } else {
    const float cut = x > curve.limit ? curve.limit : x;
    const float square = curve.bend == 0.0f ? 0.0f : cut * cut;  // which may be infinite
    const Sigmoid s = sigmoid(cut * fmaf(curve.bend, square, curve.tilt));
    const float rise = s.value * s.rest;
    if (curve.alone) return {s.value, rise};
    const float slope = fmaf(3.0f * curve.bend, square, curve.tilt);
    return {times(cut, s.value), x > curve.limit ? 0.0f : s.value + times(cut * slope, rise)};
  }
}

// What f(a) is multiplied with, and whether it follows b.
JAXTAP_DEVICE Point gate(float b, const Curve& curve) {
  if (!curve.cuts_gate) return {b, 1.0f};
  const float low = b < -curve.gate_limit ? -curve.gate_limit : b;
  const float cut = low > curve.gate_limit ? curve.gate_limit : low;
  return {cut + curve.offset, cut == b ? 1.0f : 0.0f};
}

// Calls body(a constant: whether it's rectified), so that what loops over numbers is chosen once.
template <class Body>
JAXTAP_DEVICE void by_kind(const Curve& curve, Body&& body) {
  if (curve.rectified) {
    body(std::true_type());
  } else {
    body(std::false_type());
  }
}

}  // namespace
}  // namespace jaxtap::cuda
