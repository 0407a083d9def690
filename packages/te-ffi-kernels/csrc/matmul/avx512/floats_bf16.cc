// Kernels on AVX512-BF16, which processors have that multiply bfloat16 without tiles. Compile as
// kernels.cc, with -mavx512bf16.
#include "matmul/floats.h"

#include <immintrin.h>

#include <cstring>

#include "common/convert.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/bfloat16.inl"

constexpr int kTileRows = 6, kTilePanels = 4;  // of sums: they leave 8 registers for operands

// Rows follow each other, each padded to whole steps: what a block reads of them are lines in order.
void pad_rows(const ArrangeRows& t) {
  const int64_t whole = t.steps * kStep, used = t.k < whole ? t.k : whole;
  for (int64_t r = 0; r < t.rows; ++r) {
    uint16_t* to = t.out + r * whole;
    std::memcpy(to, t.x + r * t.x_stride, static_cast<size_t>(2 * used));
    std::memset(to + used, 0, static_cast<size_t>(2 * (whole - used)));
  }
}

// Adds products of pairs. As assembly, since gcc 12 copies sums from register to register around the
// intrinsic.
JAXTAP_INLINE void add_pairs(__m512& sums, __m512i w, __m512i x) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
}

template <int R>
struct Rows {
  const uint16_t* x;
};

template <int R>
JAXTAP_INLINE Rows<R> rows_of(const FloatTile& t, int64_t row) {
  return {t.x + row * t.steps * kStep};
}

template <int R, int P>
void float_block(const FloatTile& t, const Rows<R>& rows, int64_t r0, int64_t p0) {
  __m512 acc[R][P];
  float* out = t.sums + r0 * t.sums_stride + 16 * p0;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      acc[r][p] = t.first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * t.sums_stride + 16 * p);
    }
  }
  const int64_t numbers = t.steps * kStep;
  const uint16_t* w = t.w + p0 * t.w_stride;
  for (int64_t i = 0; i < numbers; i += 2, w += 32) {
    __m512i pairs[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) pairs[p] = _mm512_loadu_si512(w + p * t.w_stride);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, rows.x + r * numbers + i, 4);
      const __m512i b = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) add_pairs(acc[r][p], pairs[p], b);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) _mm512_storeu_ps(out + r * t.sums_stride + 16 * p, acc[r][p]);
  }
}

struct Floats {
  using Operands = FloatTile;
  static constexpr int kDigits = 1, kMostRows = kTileRows;

  template <int R, int P>
  static void block(const FloatTile& t, const Rows<R>& rows, int64_t r, int64_t p) {
    float_block<R, P>(t, rows, r, p);
  }
};

#include "matmul/blocks.inl"

// A few panels by all rows, before the next panels: they stay in the first cache.
void multiply(const FloatTile& all) {
  FloatTile t = all;
  for (int64_t p = 0; p < all.panels; p += kTilePanels) {
    t.panels = all.panels - p < kTilePanels ? all.panels - p : kTilePanels;
    t.w = all.w + p * all.w_stride;
    t.sums = all.sums + 16 * p;
    all_blocks<Floats, kTilePanels>(t);
  }
}

}  // namespace

const FloatKernels& avx512_float_kernels() {
  static const FloatKernels kKernels = [] {
    FloatKernels k;
    k.arrange_rows = pad_rows;
    k.dequantize = dequantize;
    k.multiply = multiply;
    k.epilogue = avx512_kernels().epilogue;
    return k;
  }();
  return kKernels;
}

}  // namespace jaxtap
