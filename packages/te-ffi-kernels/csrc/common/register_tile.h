// Matmuls of small matrices of float32 whose results stay in registers: the inner kernel of blocked
// algorithms, which keep their factors in the caches themselves.
//
// Of one instruction set: everything has internal linkage. A file that includes this compiles
// multiply-adds as such, rounded once:
//
//   #if defined(__clang__)
//   #pragma clang fp contract(fast)
//   #elif defined(__GNUC__)
//   #pragma GCC optimize("fp-contract=fast")
//   #endif
//
// before all includes.
#pragma once

#if defined(JAXTAP_NEON)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

#define JAXTAP_TILE static inline __attribute__((always_inline))

namespace jaxtap::tile {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // numbers in a register
constexpr int kRows = 8;    // of a tile
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRows = 6;
#elif defined(JAXTAP_NEON)
constexpr int kWidth = 4;
constexpr int kRows = 8;
#else
constexpr int kWidth = 4;
constexpr int kRows = 4;
#endif
constexpr int64_t kDepth = 16;  // products that are added up one by one
constexpr int kVectors = 2;
constexpr int kCols = kWidth * kVectors;  // of a tile

typedef float Vector __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));

JAXTAP_TILE Vector read(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

JAXTAP_TILE Ints read(const int32_t* from) {
  Ints v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

JAXTAP_TILE void write(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

// How the left factor lies in memory: its element (r, k) at r * stride + k, or at k * stride + r.
enum class Left { kByRow, kByColumn };

namespace {

// What numbers of a and b are, and how their products are added: float32 here.
struct Products {
  // Whether what was in c is added last, or the sums begin with it.
  static constexpr bool kAddsLast = true;

  JAXTAP_TILE void add(Vector& sums, float factor, Vector row) { sums += factor * row; }
};

}  // namespace

// sums[kR][kV * kWidth] += a b, with b as [depth][kV * kWidth].
template <class Of, int kR, int kV, Left kLeft>
JAXTAP_TILE void sum_tile(int64_t depth, const float* __restrict a, int64_t a_stride,
                          const float* __restrict b, int64_t b_stride, Vector (&sums)[kR][kV]) {
  for (int64_t k = 0; k < depth; ++k) {
    Vector row[kV];
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) row[v] = read(b + k * b_stride + v * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < kR; ++r) {
      const float factor = kLeft == Left::kByRow ? a[r * a_stride + k] : a[k * a_stride + r];
#pragma GCC unroll 2
      for (int v = 0; v < kV; ++v) Of::add(sums[r][v], factor, row[v]);
    }
  }
}

// c[kR][kV * kWidth] = (add: c +) a b. With kLong, sums of kDepth products are added up apart, and
// what there was is added last: small numbers lose less in rounding.
template <class Of, int kR, int kV, Left kLeft, bool kLong>
JAXTAP_TILE void multiply_tile(int64_t depth, const float* __restrict a, int64_t a_stride,
                               const float* __restrict b, int64_t b_stride, float* __restrict c,
                               int64_t c_stride, bool add) {
  Vector sums[kR][kV];
#pragma GCC unroll 12
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) {
      sums[r][v] = !Of::kAddsLast && add ? read(c + r * c_stride + v * kWidth) : Vector{};
    }
  }
  if constexpr (kLong) {
    const int64_t step = kLeft == Left::kByRow ? 1 : a_stride;
    sum_tile<Of, kR, kV, kLeft>(kDepth, a, a_stride, b, b_stride, sums);
    for (int64_t k = kDepth; k < depth; k += kDepth) {
      Vector parts[kR][kV] = {};
      sum_tile<Of, kR, kV, kLeft>(depth - k < kDepth ? depth - k : kDepth, a + k * step, a_stride,
                                  b + k * b_stride, b_stride, parts);
#pragma GCC unroll 12
      for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kV; ++v) sums[r][v] += parts[r][v];
      }
    }
  } else {
    sum_tile<Of, kR, kV, kLeft>(depth, a, a_stride, b, b_stride, sums);
  }
#pragma GCC unroll 12
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) {
      float* to = c + r * c_stride + v * kWidth;
      write(to, Of::kAddsLast && add ? read(to) + sums[r][v] : sums[r][v]);
    }
  }
}

template <class Of, int kR, int kV, Left kLeft, bool kLong>
JAXTAP_TILE void multiply_last_rows(int64_t rows, int64_t depth, const float* a, int64_t a_stride,
                                    const float* b, int64_t b_stride, float* c, int64_t c_stride,
                                    bool add) {
  if constexpr (kR > 0) {
    if (rows == kR) {
      multiply_tile<Of, kR, kV, kLeft, kLong>(depth, a, a_stride, b, b_stride, c, c_stride, add);
    } else {
      multiply_last_rows<Of, kR - 1, kV, kLeft, kLong>(rows, depth, a, a_stride, b, b_stride, c,
                                                       c_stride, add);
    }
  }
}

template <class Of, int kV, Left kLeft, bool kLong>
static __attribute__((noinline)) void multiply_panel(int64_t rows, int64_t depth, const float* a,
                                                     int64_t a_stride, const float* b,
                                                     int64_t b_stride, float* c, int64_t c_stride,
                                                     bool add) {
  const int64_t step = kLeft == Left::kByRow ? a_stride : 1;
  constexpr int kStep = kLong ? kRows / 2 : kRows;  // two sums need twice the registers
  int64_t r = 0;
  for (; r + kStep <= rows; r += kStep) {
    multiply_tile<Of, kStep, kV, kLeft, kLong>(depth, a + r * step, a_stride, b, b_stride,
                                               c + r * c_stride, c_stride, add);
  }
  multiply_last_rows<Of, kStep - 1, kV, kLeft, kLong>(rows - r, depth, a + r * step, a_stride, b,
                                                      b_stride, c + r * c_stride, c_stride, add);
}

// c[rows][cols] = (add: c +) a[rows][depth] b[depth][cols]; cols is a multiple of kWidth.
template <Left kLeft, class Of = Products>
JAXTAP_TILE void multiply(int64_t rows, int64_t cols, int64_t depth, const float* a,
                          int64_t a_stride, const float* b, int64_t b_stride, float* c,
                          int64_t c_stride, bool add) {
  auto* wide = multiply_panel<Of, kVectors, kLeft, false>;
  auto* narrow = multiply_panel<Of, 1, kLeft, false>;
  if constexpr (Of::kAddsLast) {
    if (depth > kDepth) {
      wide = multiply_panel<Of, kVectors, kLeft, true>;
      narrow = multiply_panel<Of, 1, kLeft, true>;
    }
  }
  int64_t col = 0;
  for (; col + kCols <= cols; col += kCols) {
    wide(rows, depth, a, a_stride, b + col, b_stride, c + col, c_stride, add);
  }
  for (; col < cols; col += kWidth) {
    narrow(rows, depth, a, a_stride, b + col, b_stride, c + col, c_stride, add);
  }
}

}  // namespace jaxtap::tile
