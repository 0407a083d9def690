// Loops over a row: sums in lanes of a fixed number, whatever the width of a register is.

#include <cmath>

#include "norms/table.h"
#include "te/isa/formats.h"

namespace jaxtap::norms::JAXTAP_ISA_NAMESPACE {
namespace {

typedef float Lanes __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16;
constexpr int64_t kSums = 4;
constexpr int64_t kStep = kLanes * kSums;
constexpr int64_t kBlock = 1024;

using te::JAXTAP_ISA_NAMESPACE::BF16;
using te::JAXTAP_ISA_NAMESPACE::F16;
using te::JAXTAP_ISA_NAMESPACE::F32;

#define JAXTAP_LOAD(lanes, from) __builtin_memcpy(&(lanes), (from), sizeof(Lanes))
#define JAXTAP_STORE(to, lanes) __builtin_memcpy((to), &(lanes), sizeof(Lanes))

// Calls body(numbers, count) for parts of a row as float32.
template <class Format, class Body>
inline __attribute__((always_inline)) void parts(const void* x, int64_t n, Body&& body) {
  const auto* from = static_cast<const typename Format::Type*>(x);
  if constexpr (sizeof(typename Format::Type) == 4) {
    body(from, n);
  } else {
    float block[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = n - i < kBlock ? n - i : kBlock;
      const auto* __restrict some = from + i;
      for (int64_t j = 0; j < count; ++j) block[j] = Format::load(some[j]);
      body(static_cast<const float*>(block), count);
    }
  }
}

// Calls add(numbers of kStep) over a part, the last of them filled up.
template <class Add>
inline __attribute__((always_inline)) void steps(const float* x, int64_t count, float filling,
                                                 Add&& add) {
  const int64_t whole = count / kStep * kStep;
  for (int64_t i = 0; i < whole; i += kStep) add(x + i);
  if (whole == count) return;
  float last[kStep];
  for (int64_t i = 0; i < kStep; ++i) last[i] = filling;
  __builtin_memcpy(last, x + whole, static_cast<uint64_t>(count - whole) * 4);
  add(static_cast<const float*>(last));
}

// The sum of all lanes.
inline __attribute__((always_inline)) float total(const Lanes* sums) {
  const Lanes sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float lanes[kLanes];
  JAXTAP_STORE(lanes, sum);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline __attribute__((always_inline)) float inverse_root(float mean_square, float epsilon) {
  return 1.0f / std::sqrt(mean_square + epsilon);
}

// The variance is of what differs from a first mean, which may itself be off by a rounding.
template <class Format>
Moments layer(const void* x, int64_t n, float epsilon) {
  const float count = static_cast<float>(n);
  Lanes sums[kSums] = {};
  parts<Format>(x, n, [&](const float* part, int64_t size) {
    steps(part, size, 0.0f, [&](const float* at) {
      for (int64_t k = 0; k < kSums; ++k) {
        Lanes some;
        JAXTAP_LOAD(some, at + k * kLanes);
        sums[k] += some;
      }
    });
  });
  const float mean = total(sums) / count;
  Lanes rests[kSums] = {}, squares[kSums] = {};
  parts<Format>(x, n, [&](const float* part, int64_t size) {
    steps(part, size, mean, [&](const float* at) {
      for (int64_t k = 0; k < kSums; ++k) {
        Lanes some;
        JAXTAP_LOAD(some, at + k * kLanes);
        some -= mean;
        rests[k] += some;
        squares[k] += some * some;
      }
    });
  });
  const float rest = total(rests) / count;
  const float variance = total(squares) / count - rest * rest;
  return {mean, rest, inverse_root(variance < 0.0f ? 0.0f : variance, epsilon)};
}

template <class Format>
Moments rms(const void* x, int64_t n, float epsilon) {
  Lanes squares[kSums] = {};
  parts<Format>(x, n, [&](const float* part, int64_t size) {
    steps(part, size, 0.0f, [&](const float* at) {
      for (int64_t k = 0; k < kSums; ++k) {
        Lanes some;
        JAXTAP_LOAD(some, at + k * kLanes);
        squares[k] += some * some;
      }
    });
  });
  return {0.0f, 0.0f, inverse_root(total(squares) / static_cast<float>(n), epsilon)};
}

template <class Format>
void apply(const void* x, int64_t n, const Moments& moments, const float* __restrict gamma,
           const float* __restrict beta, float* __restrict out) {
  const auto* __restrict from = static_cast<const typename Format::Type*>(x);
  const float mean = moments.mean, rest = moments.rest, rsigma = moments.rsigma;
  if (beta == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = (Format::load(from[i]) - mean - rest) * rsigma * gamma[i];
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = (Format::load(from[i]) - mean - rest) * rsigma * gamma[i] + beta[i];
    }
  }
}

void means(const float* dz, const float* x, int64_t n, float mean, float rsigma,
           const float* gamma, float* first, float* second) {
  Lanes sums[kSums] = {}, products[kSums] = {};
  const auto add = [&](const float* dz_at, const float* x_at, const float* gamma_at) {
    for (int64_t k = 0; k < kSums; ++k) {
      Lanes slope, normal, factor;
      JAXTAP_LOAD(slope, dz_at + k * kLanes);
      JAXTAP_LOAD(normal, x_at + k * kLanes);
      JAXTAP_LOAD(factor, gamma_at + k * kLanes);
      slope *= factor;
      sums[k] += slope;
      products[k] += slope * ((normal - mean) * rsigma);
    }
  };
  const int64_t whole = n / kStep * kStep;
  for (int64_t i = 0; i < whole; i += kStep) add(dz + i, x + i, gamma + i);
  if (whole < n) {
    float last[3][kStep] = {};
    const auto bytes = static_cast<uint64_t>(n - whole) * 4;
    for (int64_t i = 0; i < kStep; ++i) last[1][i] = mean;
    __builtin_memcpy(last[0], dz + whole, bytes);
    __builtin_memcpy(last[1], x + whole, bytes);
    __builtin_memcpy(last[2], gamma + whole, bytes);
    add(last[0], last[1], last[2]);
  }
  *first = total(sums) / static_cast<float>(n);
  *second = total(products) / static_cast<float>(n);
}

// Some rows at a time, so that sums over rows are read and written once for them.
template <int kRows, bool kBeta>
inline __attribute__((always_inline)) void rows_backward(const Part& part, int64_t row,
                                                         float* __restrict dx, int64_t stride,
                                                         float* __restrict dgamma,
                                                         float* __restrict dbeta) {
  const float* __restrict dz = part.dz + row * part.stride;
  const float* __restrict x = part.x + row * part.stride;
  const float* __restrict gamma = part.gamma;
  float* __restrict out = dx + row * stride;
  float mean[kRows], rsigma[kRows], first[kRows], second[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean[r] = part.mean[row + r];
    rsigma[r] = part.rsigma[row + r];
    first[r] = part.first[row + r];
    second[r] = part.second[row + r];
  }
  for (int64_t i = 0; i < part.cols; ++i) {
    float products = 0.0f, sum = 0.0f;
    for (int r = 0; r < kRows; ++r) {
      const float slope = dz[r * part.stride + i];
      const float normal = (x[r * part.stride + i] - mean[r]) * rsigma[r];
      products += slope * normal;
      if (kBeta) sum += slope;
      float rest = slope * gamma[i];
      if (kBeta) rest -= first[r];
      out[r * stride + i] = rsigma[r] * (rest - normal * second[r]);
    }
    dgamma[i] += products;
    if (kBeta) dbeta[i] += sum;
  }
}

template <bool kBeta>
void all_backward(const Part& part, float* dx, int64_t stride, float* dgamma, float* dbeta) {
  int64_t row = 0;
  for (; row + 4 <= part.rows; row += 4) {
    rows_backward<4, kBeta>(part, row, dx, stride, dgamma, dbeta);
  }
  for (; row < part.rows; ++row) rows_backward<1, kBeta>(part, row, dx, stride, dgamma, dbeta);
}

void backward(const Part& part, float* dx, int64_t stride, float* dgamma, float* dbeta) {
  if (dbeta == nullptr) {
    all_backward<false>(part, dx, stride, dgamma, dbeta);
  } else {
    all_backward<true>(part, dx, stride, dgamma, dbeta);
  }
}

template <class Format>
void set(Table& table, int at) {
  table.layer[at] = layer<Format>;
  table.rms[at] = rms<Format>;
  table.apply[at] = apply<Format>;
}

}  // namespace

const Table& make_table() {
  static const Table table = [] {
    Table made{};
    set<F32>(made, 0);
    set<BF16>(made, 1);
    set<F16>(made, 2);
    made.means = means;
    made.backward = backward;
    return made;
  }();
  return table;
}

}  // namespace jaxtap::norms::JAXTAP_ISA_NAMESPACE
