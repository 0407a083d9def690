// Kernels on AVX-VNNI, which processors without AVX-512 have. Compile with:
//   -O3 -ffp-contract=off -mavx2 -mfma -mf16c -mavxvnni
//
// AVX2's vectors, and an instruction that adds four products of bytes: nothing is widened.
#include "matmul/kernels.h"

#include <immintrin.h>

#include "common/convert.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/epilogue.inl"
#include "matmul/rotate.inl"
#include "matmul/avx2/vectors.inl"
#include "matmul/plain_rows.inl"

constexpr int kTileRows = 6, kTilePanels = 1, kScaledPanels = 1;  // 12 of 16 registers hold sums
constexpr int kFewRows = 2;
constexpr bool kSignedSums = false;
template <int kDigits>
constexpr bool kTotalsStay = false;

// Adds dot products of four bytes. As assembly, since gcc 12 copies sums from register to register
// around the intrinsic.
JAXTAP_INLINE void add_dot(__m256i& sums, __m256i qvalues, __m256i x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(qvalues), "x"(x));
}

template <bool kInt16, int R, int P>
JAXTAP_INLINE void add_products(const Rows<R>& rows, const uint8_t* qvalues, int64_t, int64_t k,
                                Sums (&acc)[R][P]) {
  static_assert(P == 1 && !kInt16, "nothing else is asked for here");
  for (int64_t i = 0; i < k; i += 4, qvalues += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(qvalues + kAhead), _MM_HINT_T0);
    const __m256i w[2] = {load(qvalues), load(qvalues + 32)};
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256i b = broadcast4(rows.x + r * rows.stride + i);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) add_dot(acc[r][0].half[h], w[h], b);
    }
  }
}

#include "matmul/tile.inl"

// Apart from the sums, which would else wait for two instructions in a row.
template <bool kSmall>
JAXTAP_INLINE void add_both(__m256i& sums, __m256i low, __m256i high, __m256i x_low,
                            __m256i x_high) {
  __m256i both = _mm256_setzero_si256();
  add_dot(both, low, x_low);
  add_dot(both, high, x_high);
  sums = _mm256_add_epi32(sums, both);
}

#include "matmul/avx2/nibbles.inl"
#include "matmul/stream.inl"
#include "matmul/table.inl"

}  // namespace

const Kernels& avx_vnni_kernels() {
  // Four panels of so many rows stay in the first cache.
  static constexpr Kernels kKernels = own_kernels(4, 512, stream, kSignedSums);
  return kKernels;
}

}  // namespace jaxtap
