// Kernels on AVX2. Compile with: -O3 -ffp-contract=off -mavx2 -mfma -mf16c
//
// Quantized values of 8 bits are widened to 16 before they are multiplied: vpmaddubsw would
// saturate at 16 bits. Small numbers of a table of 4 bits cannot reach that, and use it.
#include "matmul/kernels.h"

#include <immintrin.h>

#include "common/convert.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/finish.inl"
#include "matmul/rotate.inl"

constexpr int64_t kAhead = 1024;  // bytes

JAXTAP_INLINE __m256i load(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

JAXTAP_INLINE __m256i broadcast4(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// Four rows of x of a plane row, as numbers of 16 bits: those at even and at odd places.
struct Wide {
  explicit Wide(__m256i x)
      : even(_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8)), odd(_mm256_srai_epi16(x, 8)) {}
  __m256i even, odd;
};

// Adds products of four bytes of 32, which are widened, to their sums.
JAXTAP_INLINE void add_bytes(__m256i& sums, __m256i bytes, const Wide& x) {
  const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(0x00ff));
  const __m256i odd = _mm256_srli_epi16(bytes, 8);
  sums = _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(even, x.even),
                                                 _mm256_madd_epi16(odd, x.odd)));
}

// Adds products with bytes of a table over `k` rows of K to the sums of R plane rows and the two
// halves of 16 columns, whose lines are kStride bytes apart. kSmall: four products fit int16.
template <bool kTable, bool kSmall, int R, int kStride>
JAXTAP_INLINE void add_nibbles(const uint8_t* table, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, __m256i (&acc)[R][2]) {
  const __m256i mask = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
  const __m256i bytes = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int64_t i = 0; i < k; i += 8, qvalues += kStride) {
    _mm_prefetch(reinterpret_cast<const char*>(qvalues + kAhead), _MM_HINT_T0);
    __m256i low[2], high[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i both = load(qvalues + 32 * h);
      const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      const __m256i lower = _mm256_and_si256(both, mask);
      low[h] = kTable ? _mm256_shuffle_epi8(bytes, lower) : lower;
      high[h] = kTable ? _mm256_shuffle_epi8(bytes, upper) : upper;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const int8_t* row = x + r * x_stride + i;
      const __m256i b_low = broadcast4(row), b_high = broadcast4(row + 4);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        if (kSmall) {
          const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low[h], b_low),
                                                 _mm256_maddubs_epi16(high[h], b_high));
          acc[r][h] = _mm256_add_epi32(acc[r][h], _mm256_madd_epi16(pairs, ones));
        } else {
          add_bytes(acc[r][h], low[h], Wide(b_low));
          add_bytes(acc[r][h], high[h], Wide(b_high));
        }
      }
    }
  }
}

// Adds products over `k` rows of K to the sums of R plane rows and the two halves of a panel.
template <int R>
JAXTAP_INLINE void add_products(const int8_t* x, int64_t x_stride, const uint8_t* qvalues,
                                int64_t k,
                                __m256i (&acc)[R][2]) {
  for (int64_t i = 0; i < k; i += 4, qvalues += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(qvalues + kAhead), _MM_HINT_T0);
    const __m256i w[2] = {load(qvalues), load(qvalues + 32)};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Wide b(broadcast4(x + r * x_stride + i));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) add_bytes(acc[r][h], w[h], b);
    }
  }
}

template <int R>
void exact_block(const Tile& t, int64_t r0, int64_t p) {
  __m256i acc[R][2];
  int32_t* out = t.sums + r0 * t.sums_stride + 16 * p;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m256i start =
        _mm256_set1_epi32(t.first ? -t.offsets[(r0 + r) * t.offsets_stride] : 0);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const void* from = out + r * t.sums_stride + 8 * h;
      acc[r][h] = t.first ? start : load(static_cast<const uint8_t*>(from));
    }
  }
  const uint8_t* qvalues = t.qvalues + p * t.qvalues_stride;
  for (int64_t run = 0; run < t.runs; ++run, qvalues += 16 * t.k) {
    add_products<R>(t.x + r0 * t.x_stride + t.x_runs[run], t.x_stride, qvalues, t.k, acc);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      void* to = out + r * t.sums_stride + 8 * h;
      _mm256_storeu_si256(static_cast<__m256i*>(to), acc[r][h]);
    }
  }
}

// The totals wait in memory: the sums take the registers.
template <int R>
void scaled_block(const Tile& t, int64_t r0, int64_t p) {
  float totals[R][16] = {};
  const int32_t* offsets = t.offsets + r0 * t.offsets_stride;
  const float* x_scales = t.x_scales == nullptr ? nullptr : t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p * t.qvalues_stride;
  const int8_t* x = t.x + r0 * t.x_stride;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    __m256i acc[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      acc[r][0] = acc[r][1] = _mm256_set1_epi32(-offsets[r * t.offsets_stride]);
    }
    add_products<R>(x + i, t.x_stride, qvalues, count, acc);
    float scale[16];
    __builtin_memcpy(scale, scales, 64);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 x_scale =
          _mm256_set1_ps(x_scales == nullptr ? 1.0f : x_scales[r * t.offsets_stride]);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][h]), x_scale);
        const __m256 product = _mm256_mul_ps(sum, _mm256_loadu_ps(scale + 8 * h));
        float* total = totals[r] + 8 * h;
        _mm256_storeu_ps(total, _mm256_add_ps(_mm256_loadu_ps(total), product));
      }
    }
    ++offsets;
    if (x_scales != nullptr) ++x_scales;
    scales += t.scales_step;
    qvalues += 16 * count;
  }
  for (int r = 0; r < R; ++r) {
    __builtin_memcpy(t.totals + (r0 + r) * t.sums_stride + 16 * p, totals[r], 64);
  }
}

// R rows of x: twice as many plane rows.
template <int R>
void paired_block(const Tile& t, int64_t r0, int64_t p) {
  float totals[R][16] = {};
  const int32_t* offsets = t.offsets + 2 * r0 * t.offsets_stride;
  const float* x_scales = t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p * t.qvalues_stride;
  const int8_t* x = t.x + 2 * r0 * t.x_stride;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    __m256i acc[2 * R][2];
#pragma GCC unroll 4
    for (int r = 0; r < 2 * R; ++r) {
      acc[r][0] = acc[r][1] = _mm256_set1_epi32(-offsets[r * t.offsets_stride]);
    }
    add_products<2 * R>(x + i, t.x_stride, qvalues, count, acc);
    float scale[16];
    __builtin_memcpy(scale, scales, 64);
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      const __m256 x_scale = _mm256_set1_ps(x_scales[r * t.offsets_stride]);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i low = acc[2 * r][h], high = acc[2 * r + 1][h];
        const __m256 value =
            t.whole ? _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low))
                    : _mm256_add_ps(
                          _mm256_mul_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(256.0f)),
                          _mm256_cvtepi32_ps(low));
        const __m256 product =
            _mm256_mul_ps(_mm256_mul_ps(value, x_scale), _mm256_loadu_ps(scale + 8 * h));
        float* total = totals[r] + 8 * h;
        _mm256_storeu_ps(total, _mm256_add_ps(_mm256_loadu_ps(total), product));
      }
    }
    ++offsets;
    ++x_scales;
    scales += t.scales_step;
    qvalues += 16 * count;
  }
  for (int r = 0; r < R; ++r) {
    __builtin_memcpy(t.totals + (r0 + r) * t.sums_stride + 16 * p, totals[r], 64);
  }
}

void paired8(const Tile& t) {
  const int64_t x_rows = t.rows / 2;
  for (int64_t p = 0; p < t.panels; ++p) {
    int64_t r = 0;
    for (; r + 2 <= x_rows; r += 2) paired_block<2>(t, r, p);
    if (r < x_rows) paired_block<1>(t, r, p);
  }
}

template <int R, bool kScaled>
JAXTAP_INLINE void block(const Tile& t, int64_t r, int64_t p) {
  if (kScaled) {
    scaled_block<R>(t, r, p);
  } else {
    exact_block<R>(t, r, p);
  }
}

template <bool kScaled>
void all_blocks(const Tile& t) {
  for (int64_t p = 0; p < t.panels; ++p) {
    int64_t r = 0;
    for (; r + 4 <= t.rows; r += 4) block<4, kScaled>(t, r, p);
    if (t.rows - r == 3) {
      block<3, kScaled>(t, r, p);
    } else if (t.rows - r == 2) {
      block<2, kScaled>(t, r, p);
    } else if (t.rows - r == 1) {
      block<1, kScaled>(t, r, p);
    }
  }
}

// 16 columns at a time: the sums of 32 would leave no registers.
template <bool kTable, int kRows>
JAXTAP_INLINE void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, const int32_t* offsets,
                               int64_t offsets_stride, int32_t (*sums)[32]) {
  const uint8_t* bytes = table.bytes[part];
  for (int half = 0; half < 2; ++half) {
    __m256i acc[kRows][2];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = acc[r][1] = _mm256_set1_epi32(-offsets[r * offsets_stride]);
    }
    const uint8_t* from = qvalues + 64 * half;
    !kTable || table.is_small()
        ? add_nibbles<kTable, true, kRows, 128>(bytes, x, x_stride, from, k, acc)
        : add_nibbles<kTable, false, kRows, 128>(bytes, x, x_stride, from, k, acc);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      __m256i* to = reinterpret_cast<__m256i*>(sums[r] + 16 * half);
      _mm256_storeu_si256(to, acc[r][0]);
      _mm256_storeu_si256(to + 1, acc[r][1]);
    }
  }
}

#include "matmul/stream.inl"

}  // namespace

const Kernels& avx2_kernels() {
  static constexpr Kernels kKernels = {1,
                                       4096,
                                       30000,
                                       1,
                                       false,
                                       false,
                                       all_blocks<false>,
                                       all_blocks<true>,
                                       paired8,
                                       nullptr,
                                       expand_panel<false>,
                                       nullptr,
                                       stream,
                                       rotate_row,
                                       quantize_row,
                                       quantize_pairs,
                                       finish,
                                       nullptr};
  return kKernels;
}

}  // namespace jaxtap
