// The activations and their derivatives.
//
// Where a sigmoid is 0 the result is 0, which is the limit for x to -inf. NaN stays NaN.

#include "activations/table.h"
#include "common/vmath.h"

namespace jaxtap::activations::JAXTAP_ISA_NAMESPACE {
namespace {

#define JAXTAP_ALWAYS inline __attribute__((always_inline))

// 1 / (1 + e^-x), and what it lacks to 1, both to a few units in the last place.
struct Sigmoid {
  float value, rest;
};

JAXTAP_ALWAYS Sigmoid sigmoid(float x) {
  const float e = vexp(-x);
  const float value = 1.0f / (1.0f + e);
  return {value, e < 1e30f ? e * value : 1.0f};
}

// What a function gives: its value, and its derivative.
struct Point {
  float value, slope;
};

JAXTAP_ALWAYS float times(float x, float gate) { return gate == 0.0f ? 0.0f : x * gate; }

// x * sigmoid(u), where u' = slope.
JAXTAP_ALWAYS Point swish(float x, float u, float slope) {
  const Sigmoid s = sigmoid(u);
  const float change = s.value * s.rest;
  return {times(x, s.value), s.value + times(x * slope, change)};
}

struct Gelu {
  static JAXTAP_ALWAYS Point at(float x, const Params&) {
    // 1 + tanh(v) is 2 sigmoid(2 v), where v = sqrt(2 / pi) (x + 0.044715 x^3).
    constexpr float kRoot = 1.5957691216f, kCube = 0.0713548163f;
    const float square = x * x;
    return swish(x, x * vfma(kCube, square, kRoot), vfma(3.0f * kCube, square, kRoot));
  }
};

struct Sigmoidal {
  static JAXTAP_ALWAYS Point at(float x, const Params&) {
    const Sigmoid s = sigmoid(x);
    return {s.value, s.value * s.rest};
  }
};

struct Silu {
  static JAXTAP_ALWAYS Point at(float x, const Params&) { return swish(x, x, 1.0f); }
};

struct Relu {
  static JAXTAP_ALWAYS Point at(float x, const Params&) {
    return {x <= 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  }
};

struct QuickGelu {
  static JAXTAP_ALWAYS Point at(float x, const Params&) {
    return swish(x, 1.702f * x, 1.702f);
  }
};

struct SquaredRelu {
  static JAXTAP_ALWAYS Point at(float x, const Params&) {
    const float part = x <= 0.0f ? 0.0f : x;
    return {part * part, 2.0f * part};
  }
};

struct ClampedSilu {
  static JAXTAP_ALWAYS Point at(float x, const Params& params) {
    const float cut = x > params.limit ? params.limit : x;
    const Point point = swish(cut, params.alpha * cut, params.alpha);
    return {point.value, x > params.limit ? 0.0f : point.slope};
  }
};

// What f(a) is multiplied with, and whether it follows b.
template <class F>
JAXTAP_ALWAYS Point gate(float b, const Params&) {
  return {b, 1.0f};
}

template <>
JAXTAP_ALWAYS Point gate<ClampedSilu>(float b, const Params& params) {
  const float low = b < -params.limit ? -params.limit : b;
  const float cut = low > params.limit ? params.limit : low;
  return {cut + params.offset, cut == b ? 1.0f : 0.0f};
}

template <class F>
void forward(const float* __restrict x, float* __restrict out, int64_t n, const Params& given) {
  const Params params = given;
  for (int64_t i = 0; i < n; ++i) out[i] = F::at(x[i], params).value;
}

template <class F>
void gated(const float* __restrict a, const float* __restrict b, float* __restrict out, int64_t n,
           const Params& given) {
  const Params params = given;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = F::at(a[i], params).value * gate<F>(b[i], params).value;
  }
}

template <class F>
void backward(const float* __restrict dz, const float* __restrict x, float* __restrict dx,
              int64_t n, const Params& given) {
  const Params params = given;
  for (int64_t i = 0; i < n; ++i) dx[i] = dz[i] * F::at(x[i], params).slope;
}

template <class F>
void gated_backward(const float* __restrict dz, const float* __restrict a,
                    const float* __restrict b, float* __restrict da, float* __restrict db,
                    int64_t n, const Params& given) {
  const Params params = given;
  for (int64_t i = 0; i < n; ++i) {
    const Point first = F::at(a[i], params), second = gate<F>(b[i], params);
    da[i] = dz[i] * first.slope * second.value;
    db[i] = dz[i] * first.value * second.slope;
  }
}

template <class F>
void set(Table& table, Function function) {
  const int at = static_cast<int>(function);
  table.forward[at] = forward<F>;
  table.gated[at] = gated<F>;
  table.backward[at] = backward<F>;
  table.gated_backward[at] = gated_backward<F>;
}

}  // namespace

const Table& make_table() {
  static const Table table = [] {
    Table made{};
    set<Gelu>(made, Function::kGelu);
    set<Sigmoidal>(made, Function::kSigmoid);
    set<Silu>(made, Function::kSilu);
    set<Relu>(made, Function::kRelu);
    set<QuickGelu>(made, Function::kQuickGelu);
    set<SquaredRelu>(made, Function::kSquaredRelu);
    set<ClampedSilu>(made, Function::kClampedSilu);
    return made;
  }();
  return table;
}

}  // namespace jaxtap::activations::JAXTAP_ISA_NAMESPACE
