// Numbers of bfloat16 by pairs, in the 4 bytes of a float, as vdpbf16ps multiplies them: a pair of
// the left factor with a pair of the right one, added in float32. For processors with AVX512-BF16.
#pragma once

#include "attention/isa/panel.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

using tile::Left;

JAXTAP_TILE __m512bh pairs_of(__m512i bits) { return (__m512bh)bits; }

// As tile::multiply_tile, of pairs.
template <int kR, int kV, Left kLeft>
JAXTAP_TILE void multiply_tile(int64_t depth, const float* __restrict a, int64_t a_stride,
                               const float* __restrict b, int64_t b_stride, float* __restrict c,
                               int64_t c_stride, bool add) {
  __m512 sums[kR][kV];
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) {
      sums[r][v] = add ? _mm512_loadu_ps(c + r * c_stride + v * 16) : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512bh row[kV];
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) {
      row[v] = pairs_of(_mm512_loadu_si512(b + k * b_stride + v * 16));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      int32_t bits;
      std::memcpy(&bits, kLeft == Left::kByRow ? a + r * a_stride + k : a + k * a_stride + r, 4);
      const __m512bh factor = pairs_of(_mm512_set1_epi32(bits));
#pragma GCC unroll 2
      for (int v = 0; v < kV; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, row[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) _mm512_storeu_ps(c + r * c_stride + v * 16, sums[r][v]);
  }
}

template <int kR, int kV, Left kLeft>
JAXTAP_TILE void multiply_last_rows(int64_t rows, int64_t depth, const float* a, int64_t a_stride,
                                    const float* b, int64_t b_stride, float* c, int64_t c_stride,
                                    bool add) {
  if constexpr (kR > 0) {
    if (rows == kR) {
      multiply_tile<kR, kV, kLeft>(depth, a, a_stride, b, b_stride, c, c_stride, add);
    } else {
      multiply_last_rows<kR - 1, kV, kLeft>(rows, depth, a, a_stride, b, b_stride, c, c_stride,
                                            add);
    }
  }
}

template <int kV, Left kLeft>
__attribute__((noinline)) void multiply_panel(int64_t rows, int64_t depth, const float* a,
                                              int64_t a_stride, const float* b, int64_t b_stride,
                                              float* c, int64_t c_stride, bool add) {
  const int64_t step = kLeft == Left::kByRow ? a_stride : 1;
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    multiply_tile<8, kV, kLeft>(depth, a + r * step, a_stride, b, b_stride, c + r * c_stride,
                                c_stride, add);
  }
  multiply_last_rows<7, kV, kLeft>(rows - r, depth, a + r * step, a_stride, b, b_stride,
                                   c + r * c_stride, c_stride, add);
}

// As tile::multiply, of `depth` pairs.
template <Left kLeft>
inline void multiply_pairs(int64_t rows, int64_t cols, int64_t depth, const float* a,
                           int64_t a_stride, const float* b, int64_t b_stride, float* c,
                           int64_t c_stride, bool add) {
  int64_t col = 0;
  for (; col + 32 <= cols; col += 32) {
    multiply_panel<2, kLeft>(rows, depth, a, a_stride, b + col, b_stride, c + col, c_stride, add);
  }
  for (; col < cols; col += 16) {
    multiply_panel<1, kLeft>(rows, depth, a, a_stride, b + col, b_stride, c + col, c_stride, add);
  }
}

inline int64_t pair_count(int64_t size) { return (size + 1) / 2; }

// Neighbours of a row of bfloat16 as pairs, and zeros up to `width` pairs.
inline void pair_row(const char* row, int64_t size, float* to, int64_t width) {
  std::memcpy(to, row, static_cast<size_t>(2 * size));
  std::memset(reinterpret_cast<char*>(to) + 2 * size, 0, static_cast<size_t>(4 * width - 2 * size));
}

// Pairs of the same place in two rows (the second may be missing), and zeros up to `width`.
inline void pair_rows(const char* first, const char* second, int64_t size, float* to,
                      int64_t width) {
  for (int64_t i = 0; i < width; i += 16) {
    const int64_t left = size - i;
    const __mmask16 mask =
        left >= 16 ? __mmask16(0xffff) : left <= 0 ? __mmask16(0) : __mmask16((1u << left) - 1);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first + 2 * i));
    __m512i both = low;
    if (second != nullptr) {
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, second + 2 * i));
      both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    _mm512_storeu_si512(to + i, both);
  }
}

// [count][kCols] of float32, rounded, as pairs of rows [pair_count(count)][kCols].
inline void round_by_rows(const float* from, int64_t count, int64_t columns, float* to) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i places = _mm512_load_si512(order);
  for (int64_t i = 0; i < count; i += 2) {
    for (int64_t c = 0; c < columns; c += 16) {
      const __m512 low = _mm512_loadu_ps(from + i * kCols + c);
      const __m512 high =
          i + 1 < count ? _mm512_loadu_ps(from + (i + 1) * kCols + c) : _mm512_setzero_ps();
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      _mm512_storeu_si512(to + i / 2 * kCols + c, _mm512_permutexvar_epi16(places, both));
    }
  }
}

// The same as pairs of neighbours in each row, [count][kCols / 2].
inline void round_by_columns(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const __m512 low = _mm512_loadu_ps(from + i * kCols);
    const __m512 high = _mm512_loadu_ps(from + i * kCols + 16);
    _mm512_storeu_si512(to + i * (kCols / 2), (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// A panel as columns of pairs, [padded(pair_count(size))][kCols].
inline void pair_panel(const Problem& p, const Tokens& tokens, const Segment& segment,
                       const Rows& rows, const Panel& panel, int64_t size, float* to,
                       float* by_query) {
  const int64_t width = padded(pair_count(size));
  for (int64_t r = 0; r < panel.rows; ++r) {
    pair_row(row_of(p, tokens, segment, rows, panel.begin + r), size, by_query + r * width, width);
  }
  std::memset(by_query + panel.rows * width, 0,
              static_cast<size_t>((kCols - panel.rows) * width) * sizeof(float));
  transpose(by_query, width, kCols, width, to, kCols);
}

// The rows of a panel by pairs of rows, [kCols / 2][padded(size)].
inline void pair_panel_rows(const Problem& p, const Tokens& tokens, const Segment& segment,
                            const Rows& rows, const Panel& panel, int64_t size, float* to) {
  for (int64_t r = 0; r < panel.rows; r += 2) {
    const int64_t row = panel.begin + r;
    const char* second =
        r + 1 < panel.rows ? row_of(p, tokens, segment, rows, row + 1) : nullptr;
    pair_rows(row_of(p, tokens, segment, rows, row), second, size, to + r / 2 * padded(size),
              padded(size));
  }
}

// Rows of a block as pairs of neighbours, [count][padded(pair_count(size))].
inline void pair_block(const Problem& p, const Tokens& tokens, const Segment& segment,
                       int64_t kv_head, int64_t key, int64_t count, int64_t size, float* to) {
  const int64_t width = padded(pair_count(size));
  for (int64_t i = 0; i < count; ++i) {
    pair_row(row_of(p, tokens, segment, kv_head, key + i), size, to + i * width, width);
  }
}

// Rows of a block by pairs of rows, [pair_count(count)][padded(size)].
inline void pair_block_rows(const Problem& p, const Tokens& tokens, const Segment& segment,
                            int64_t kv_head, int64_t key, int64_t count, int64_t size, float* to) {
  for (int64_t i = 0; i < count; i += 2) {
    const char* second =
        i + 1 < count ? row_of(p, tokens, segment, kv_head, key + i + 1) : nullptr;
    pair_rows(row_of(p, tokens, segment, kv_head, key + i), second, size, to + i / 2 * padded(size),
              padded(size));
  }
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
