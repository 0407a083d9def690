// Kernels on AVX-512 VNNI. Compile with:
//   -O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c
//   -mprefer-vector-width=512
#include "matmul/kernels.h"

#include <immintrin.h>

#include "common/convert.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/epilogue.inl"
#include "matmul/rotate.inl"

constexpr int kTileRows = 6, kTilePanels = 4;  // of sums: they leave 8 registers for operands
constexpr int kScaledPanels = 2;
template <int kDigits>
constexpr bool kTotalsStay = kDigits == 1;
constexpr int kFewRows = 4;
constexpr bool kSignedSums = false;
constexpr int64_t kAhead = 2048;  // bytes
constexpr int64_t kStreamAhead = 8 * 576;  // bytes: four groups of 32 rows in a panel of 32 columns

using Sums = __m512i;
using Floats = __m512;

JAXTAP_INLINE Sums sums_of(int32_t x) { return _mm512_set1_epi32(x); }
JAXTAP_INLINE Sums load_sums(const int32_t* from) { return _mm512_loadu_si512(from); }
JAXTAP_INLINE void store_sums(int32_t* to, const Sums& x) { _mm512_storeu_si512(to, x); }
JAXTAP_INLINE Floats load_floats(const void* from) { return _mm512_loadu_ps(from); }
JAXTAP_INLINE void store_floats(void* to, const Floats& x) { _mm512_storeu_ps(to, x); }
JAXTAP_INLINE Floats to_floats(const Sums& x) { return _mm512_cvtepi32_ps(x); }

template <bool kFitsInt32>
JAXTAP_INLINE Floats two_digits(const Sums& low, const Sums& high) {
  if (kFitsInt32) return to_floats(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
  return to_floats(high) * 256.0f + to_floats(low);
}

JAXTAP_INLINE __m512i broadcast4(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}

// Adds dot products of four bytes. As assembly, since gcc 12 copies sums from register to register
// around the intrinsic.
JAXTAP_INLINE void add_dot(__m512i& sums, __m512i qvalues, __m512i x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(qvalues), "v"(x));
}

// The same of two numbers of 16 bits.
JAXTAP_INLINE void add_int16_dot(__m512i& sums, __m512i qvalues, __m512i x) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(qvalues), "v"(x));
}

// The 16 bytes of a part of a table, four times.
JAXTAP_INLINE __m512i bytes_of(const Table& table, int part) {
  const auto* bytes = reinterpret_cast<const __m128i*>(table.bytes[part]);
  return _mm512_broadcast_i32x4(_mm_loadu_si128(bytes));
}

#include "matmul/plain_rows.inl"

template <bool kInt16, int R, int P>
JAXTAP_INLINE void add_products(const Rows<R>& rows, const uint8_t* qvalues, int64_t qvalues_stride,
                                int64_t k, __m512i (&acc)[R][P]) {
  const int64_t bytes = kInt16 ? 2 * k : k;  // of a row
  for (int64_t i = 0; i < bytes; i += 4, qvalues += 64) {
    __m512i w[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      w[p] = _mm512_loadu_si512(qvalues + p * qvalues_stride);
      if (R <= kFewRows) {
        _mm_prefetch(reinterpret_cast<const char*>(qvalues + p * qvalues_stride + kAhead),
                     _MM_HINT_T0);
      }
    }
    if (R > kFewRows && i % 64 == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        _mm_prefetch(reinterpret_cast<const char*>(rows.x + (R + r) * rows.stride + i), _MM_HINT_T0);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i b = broadcast4(rows.x + r * rows.stride + i);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        kInt16 ? add_int16_dot(acc[r][p], w[p], b) : add_dot(acc[r][p], w[p], b);
      }
    }
  }
}

#include "matmul/tile.inl"
#include "matmul/avx512/int16.inl"

// Up to 3 digit rows have sums of their own for low and high nibbles: instructions that add to one
// register wait for each other.
template <bool kTable, int kRows>
JAXTAP_INLINE void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, const int32_t* offsets,
                               int64_t offsets_stride, int32_t (*sums)[32]) {
  constexpr int kParts = kRows <= 3 ? 2 : 1;
  const __m512i mask = _mm512_set1_epi8(0x0f), bytes = bytes_of(table, part);
  __m512i acc[kParts][kRows][2];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    if (kParts == 2) acc[kParts - 1][r][0] = acc[kParts - 1][r][1] = _mm512_setzero_si512();
    acc[0][r][0] = acc[0][r][1] = _mm512_set1_epi32(-offsets[r * offsets_stride]);
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < k; i += 8, qvalues += 128) {
    __m512i low[2], high[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i both = _mm512_loadu_si512(qvalues + 64 * h);
      _mm_prefetch(reinterpret_cast<const char*>(qvalues + 64 * h + kStreamAhead), _MM_HINT_T0);
      const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      const __m512i lower = _mm512_and_si512(both, mask);
      low[h] = kTable ? _mm512_shuffle_epi8(bytes, lower) : lower;
      high[h] = kTable ? _mm512_shuffle_epi8(bytes, upper) : upper;
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const int8_t* row = x + r * x_stride + i;
      const __m512i b_low = broadcast4(row), b_high = broadcast4(row + 4);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        add_dot(acc[0][r][h], low[h], b_low);
        add_dot(acc[kParts - 1][r][h], high[h], b_high);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      __m512i sum = acc[0][r][h];
      if (kParts == 2) sum = _mm512_add_epi32(sum, acc[kParts - 1][r][h]);
      _mm512_storeu_si512(sums[r] + 16 * h, sum);
    }
  }
}

#include "matmul/stream.inl"
#include "matmul/table.inl"

}  // namespace

const Kernels& avx512_kernels() {
  static constexpr Kernels kKernels = [] {
    Kernels k = own_kernels(kTilePanels, 512, stream, kSignedSums);
    k.two_digits16 = two_digits16;
    k.expand_panel16 = expand_panel16;
    return k;
  }();
  return kKernels;
}

}  // namespace jaxtap
