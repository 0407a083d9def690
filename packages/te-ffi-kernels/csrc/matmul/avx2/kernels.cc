// Kernels on AVX2. Compile with: -O3 -ffp-contract=off -mavx2 -mfma -mf16c
//
// Quantized values of 8 bits are widened to 16 before they are multiplied: vpmaddubsw would
// saturate at 16 bits. Small numbers of a table of 4 bits cannot reach that, and use it.
#include "matmul/kernels.h"

#include <immintrin.h>

#include "common/arena.h"
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

// Four bytes of each word as numbers of 16 bits: those at even and at odd places.
struct Wide {
  __m256i even, odd;
};

JAXTAP_INLINE Wide wide_bytes(__m256i w) {
  return {_mm256_and_si256(w, _mm256_set1_epi16(0x00ff)), _mm256_srli_epi16(w, 8)};
}

JAXTAP_INLINE Wide wide_numbers(__m256i x) {
  return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
}

// Adds the products of four.
JAXTAP_INLINE void add_wide(__m256i& sums, const Wide& w, const Wide& x) {
  const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(w.even, x.even),
                                            _mm256_madd_epi16(w.odd, x.odd));
  sums = _mm256_add_epi32(sums, products);
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
          add_wide(acc[r][h], wide_bytes(low[h]), wide_numbers(b_low));
          add_wide(acc[r][h], wide_bytes(high[h]), wide_numbers(b_high));
        }
      }
    }
  }
}

struct WordsTag {};

// Rows are multiplied by this many panels, as often as their widened numbers are read.
constexpr int64_t kBlockPanels = 4;
constexpr int kBlockRows = 4;  // plane rows whose sums fit the registers

// Widens the numbers of R plane rows to 16 bits, for all panels of a block at once. Of four of a row
// the words hold the first and third, and the second and fourth, as `add_products` multiplies them;
// those of the other rows follow: [k / 4, R, 2].
template <int R>
JAXTAP_INLINE void widen(const int8_t* x, int64_t x_stride, int64_t k, int32_t* words) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  for (int64_t i = 0; i < k; i += 4, words += 2 * R) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      int32_t four;
      __builtin_memcpy(&four, x + r * x_stride + i, 4);
      const __m128i ordered = _mm_shuffle_epi8(_mm_cvtsi32_si128(four), order);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(words + 2 * r), _mm_cvtepi8_epi16(ordered));
    }
  }
}

// Adds products over `k` rows of K to the sums of R widened rows and the two halves of a panel.
template <int R>
JAXTAP_INLINE void add_products(const int32_t* words, const uint8_t* qvalues, int64_t k,
                                __m256i (&acc)[R][2]) {
  for (int64_t i = 0; i < k; i += 4, qvalues += 64, words += 2 * R) {
    _mm_prefetch(reinterpret_cast<const char*>(qvalues + kAhead), _MM_HINT_T0);
    const Wide w[2] = {wide_bytes(load(qvalues)), wide_bytes(load(qvalues + 32))};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Wide b{_mm256_set1_epi32(words[2 * r]), _mm256_set1_epi32(words[2 * r + 1])};
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) add_wide(acc[r][h], w[h], b);
    }
  }
}

template <int R>
void exact_block(const Tile& t, int64_t r0, int64_t p, const int32_t* words) {
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
  add_products<R>(words, t.qvalues + p * t.qvalues_stride, t.runs * t.k, acc);
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
void scaled_block(const Tile& t, int64_t r0, int64_t p, const int32_t* words) {
  float totals[R][16] = {};
  const int32_t* offsets = t.offsets + r0 * t.offsets_stride;
  const float* x_scales = t.x_scales == nullptr ? nullptr : t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p * t.qvalues_stride;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    __m256i acc[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      acc[r][0] = acc[r][1] = _mm256_set1_epi32(-offsets[r * t.offsets_stride]);
    }
    add_products<R>(words + R * i / 2, qvalues, count, acc);
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
void paired_block(const Tile& t, int64_t r0, int64_t p, const int32_t* words) {
  float totals[R][16] = {};
  const int32_t* offsets = t.offsets + 2 * r0 * t.offsets_stride;
  const float* x_scales = t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p * t.qvalues_stride;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    __m256i acc[2 * R][2];
#pragma GCC unroll 4
    for (int r = 0; r < 2 * R; ++r) {
      acc[r][0] = acc[r][1] = _mm256_set1_epi32(-offsets[r * t.offsets_stride]);
    }
    add_products<2 * R>(words + R * i, qvalues, count, acc);
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

enum class How { kExact, kScaled, kPaired };

// R plane rows by all panels of a block.
template <int R, How kHow>
void rows_by_panels(const Tile& t, int64_t r, int32_t* words) {
  for (int64_t run = 0; run < t.runs; ++run) {
    widen<R>(t.x + r * t.x_stride + t.x_runs[run], t.x_stride, t.k, words + run * R * t.k / 2);
  }
  for (int64_t p = 0; p < t.panels; ++p) {
    if constexpr (kHow == How::kExact) {
      exact_block<R>(t, r, p, words);
    } else if constexpr (kHow == How::kScaled) {
      scaled_block<R>(t, r, p, words);
    } else {
      paired_block<R / 2>(t, r / 2, p, words);
    }
  }
}

template <How kHow>
void all_blocks(const Tile& t) {
  int32_t* words = Arena<WordsTag>::get_array<int32_t>(kBlockRows * t.runs * t.k / 2);
  int64_t r = 0;
  for (; r + kBlockRows <= t.rows; r += kBlockRows) rows_by_panels<kBlockRows, kHow>(t, r, words);
  if (t.rows - r == 2) {
    rows_by_panels<2, kHow>(t, r, words);
  } else if constexpr (kHow != How::kPaired) {  // which has an even number
    if (t.rows - r == 3) {
      rows_by_panels<3, kHow>(t, r, words);
    } else if (t.rows - r == 1) {
      rows_by_panels<1, kHow>(t, r, words);
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
  static constexpr Kernels kKernels = {kBlockPanels,
                                       4096,
                                       30000,
                                       1,
                                       false,
                                       false,
                                       all_blocks<How::kExact>,
                                       all_blocks<How::kScaled>,
                                       all_blocks<How::kPaired>,
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
