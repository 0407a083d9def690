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
#include "matmul/epilogue.inl"
#include "matmul/rotate.inl"

#include "matmul/avx2/vectors.inl"

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

// Adds products with low and high nibbles.
template <bool kSmall>
JAXTAP_INLINE void add_both(__m256i& sums, __m256i low, __m256i high, __m256i x_low,
                            __m256i x_high) {
  if (kSmall) {
    const __m256i pairs =
        _mm256_add_epi16(_mm256_maddubs_epi16(low, x_low), _mm256_maddubs_epi16(high, x_high));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  } else {
    add_wide(sums, wide_bytes(low), wide_numbers(x_low));
    add_wide(sums, wide_bytes(high), wide_numbers(x_high));
  }
}

#include "matmul/avx2/nibbles.inl"

constexpr int kTileRows = 4, kTilePanels = 1, kScaledPanels = 1;  // digit rows that registers hold
constexpr int kFewRows = 2;
constexpr bool kSignedSums = false;
template <int kDigits>
constexpr bool kTotalsStay = false;
constexpr int64_t kBlockPanels = 4;  // panels that widened rows are multiplied by

struct WordsTag {};

// Digit rows whose numbers are widened to 16 bits, once for all panels of a block. Of four of a row
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

template <bool kInt16, int R, int P>
JAXTAP_INLINE void add_products(const Rows<R>& rows, const uint8_t* qvalues, int64_t, int64_t k,
                                Sums (&acc)[R][P]) {
  static_assert(P == 1 && !kInt16, "nothing else is asked for here");
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

#include "matmul/stream.inl"
#include "matmul/table.inl"

}  // namespace

const Kernels& avx2_kernels() {
  static constexpr Kernels kKernels = own_kernels(kBlockPanels, 4096, stream, kSignedSums);
  return kKernels;
}

}  // namespace jaxtap
