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

constexpr int kTileRows = 4, kTilePanels = 1, kScaledPanels = 1;  // plane rows that registers hold
constexpr int kFewRows = 2;
template <int kPlanes>
constexpr bool kTotalsStay = false;
constexpr int64_t kBlockPanels = 4;  // panels that widened rows are multiplied by

struct Sums {
  __m256i half[2];
};

struct Floats {
  __m256 half[2];

  friend Floats operator+(const Floats& a, const Floats& b) {
    return {_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])};
  }
  friend Floats operator*(const Floats& a, const Floats& b) {
    return {_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])};
  }
  friend Floats operator*(const Floats& a, float b) {
    const __m256 by = _mm256_set1_ps(b);
    return {_mm256_mul_ps(a.half[0], by), _mm256_mul_ps(a.half[1], by)};
  }
};

JAXTAP_INLINE Sums sums_of(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

JAXTAP_INLINE Sums load_sums(const int32_t* from) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

JAXTAP_INLINE void store_sums(int32_t* to, const Sums& x) {
  auto* halves = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, x.half[0]);
  _mm256_storeu_si256(halves + 1, x.half[1]);
}

JAXTAP_INLINE Floats load_floats(const void* from) {
  const auto* floats = static_cast<const float*>(from);
  return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + 8)};
}

JAXTAP_INLINE void store_floats(void* to, const Floats& x) {
  auto* floats = static_cast<float*>(to);
  _mm256_storeu_ps(floats, x.half[0]);
  _mm256_storeu_ps(floats + 8, x.half[1]);
}

JAXTAP_INLINE Floats to_floats(const Sums& x) {
  return {_mm256_cvtepi32_ps(x.half[0]), _mm256_cvtepi32_ps(x.half[1])};
}

template <bool kWhole>
JAXTAP_INLINE Floats two_planes(const Sums& low, const Sums& high) {
  if (!kWhole) return to_floats(high) * 256.0f + to_floats(low);
  Sums both;
  for (int h = 0; h < 2; ++h) {
    both.half[h] = _mm256_add_epi32(_mm256_slli_epi32(high.half[h], 8), low.half[h]);
  }
  return to_floats(both);
}

struct WordsTag {};

// Plane rows whose numbers are widened to 16 bits, once for all panels of a block. Of four of a row
// the words hold the first and third, and the second and fourth, as `add_products` multiplies them;
// those of the other rows follow: [k / 4, R, 2].
template <int R>
struct Rows {
  const int32_t* words;

  Rows from(int64_t i) const { return {words + R * i / 2}; }
};

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

template <int R>
Rows<R> rows_of(const Tile& t, int64_t row) {
  int32_t* words = Arena<WordsTag>::get_array<int32_t>(kTileRows * t.runs * t.k / 2);
  for (int64_t run = 0; run < t.runs; ++run) {
    widen<R>(t.x + row * t.x_stride + t.x_runs[run], t.x_stride, t.k, words + run * R * t.k / 2);
  }
  return {words};
}

template <int R>
JAXTAP_INLINE Rows<R> run_of(const Tile& t, const Rows<R>& rows, int64_t run) {
  return rows.from(run * t.k);
}

template <bool kWide, int R, int P>
JAXTAP_INLINE void add_products(const Rows<R>& rows, const uint8_t* qvalues, int64_t, int64_t k,
                                Sums (&acc)[R][P]) {
  static_assert(P == 1 && !kWide, "nothing else is asked for here");
  const int32_t* words = rows.words;
  for (int64_t i = 0; i < k; i += 4, qvalues += 64, words += 2 * R) {
    _mm_prefetch(reinterpret_cast<const char*>(qvalues + kAhead), _MM_HINT_T0);
    const Wide w[2] = {wide_bytes(load(qvalues)), wide_bytes(load(qvalues + 32))};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Wide b{_mm256_set1_epi32(words[2 * r]), _mm256_set1_epi32(words[2 * r + 1])};
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) add_wide(acc[r][0].half[h], w[h], b);
    }
  }
}

#include "matmul/tile.inl"

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
#include "matmul/table.inl"

}  // namespace

const Kernels& avx2_kernels() {
  static constexpr Kernels kKernels = [] {
    Kernels k = own_kernels();
    k.block_panels = kBlockPanels;
    k.block_k = 4096;
    k.task_steps = 30000;
    k.least_rows = 1;
    k.expand_panel = expand_panel<false>;
    k.stream = stream;
    return k;
  }();
  return kKernels;
}

}  // namespace jaxtap
