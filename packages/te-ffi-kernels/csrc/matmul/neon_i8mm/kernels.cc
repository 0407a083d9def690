// Kernels on NEON with the int8 matrix products of Armv8.6: unsigned bytes with signed ones, as they
// lie. Compile with: -O3 -ffp-contract=off -march=armv8.2-a+dotprod+i8mm
//
// One row of x is multiplied by USDOT. Two are a matrix of two by eight numbers for USMMLA, which
// multiplies it with eight rows of K of two columns: twice the products of an instruction.
#include "matmul/kernels.h"

#include <arm_neon.h>

#include "common/convert.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/epilogue.inl"
#include "matmul/rotate.inl"
#include "matmul/neon/vectors.inl"
#include "matmul/plain_rows.inl"

constexpr int kTileRows = 6, kTilePanels = 1, kScaledPanels = 1;  // 24 of 32 registers hold sums
constexpr bool kSignedSums = false;

#include "matmul/neon/lines.inl"

template <int kLine, bool kLast>
JAXTAP_INLINE void add_line(Sums& sums, uint8x16_t bytes, const Eight& x) {
  sums.at[kLine] = vusdotq_lane_s32(sums.at[kLine], bytes, x, kLast);
}

#include "matmul/neon/products.inl"

// Eight rows of K, or four: kEight. `pairs`: sums of two rows of x, column by column. An odd row has
// sums of its own.
template <bool kEight, int R>
JAXTAP_INLINE void add_pairs(const Rows<R>& rows, int64_t i, const uint8_t* qvalues,
                             int32x4_t (&pairs)[R / 2][8], Sums& odd) {
  const auto load = [&](int r) __attribute__((always_inline)) {
    const int8_t* x = rows.x + r * rows.stride + i;
    return kEight ? vld1_s8(x) : four_of(x);
  };
  int8x16_t x[R / 2];
#pragma GCC unroll 3
  for (int p = 0; p < R / 2; ++p) x[p] = vcombine_s8(load(2 * p), load(2 * p + 1));
  [[maybe_unused]] int8x8_t last;
  if constexpr (R % 2 == 1) last = load(R - 1);
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const uint8x16_t first = vld1q_u8(qvalues + 16 * q);
    const uint8x16_t second = kEight ? vld1q_u8(qvalues + 64 + 16 * q) : vdupq_n_u8(0);
    // The rows of K of two columns, and of the next two.
    const uint32x4_t upper = vreinterpretq_u32_u8(first), lower = vreinterpretq_u32_u8(second);
    const uint8x16_t w[2] = {vreinterpretq_u8_u32(vzip1q_u32(upper, lower)),
                             vreinterpretq_u8_u32(vzip2q_u32(upper, lower))};
#pragma GCC unroll 3
    for (int p = 0; p < R / 2; ++p) {
      pairs[p][2 * q] = vusmmlaq_s32(pairs[p][2 * q], w[0], x[p]);
      pairs[p][2 * q + 1] = vusmmlaq_s32(pairs[p][2 * q + 1], w[1], x[p]);
    }
    if constexpr (R % 2 == 1) {
      odd.at[q] = vusdotq_lane_s32(odd.at[q], first, last, 0);
      if (kEight) odd.at[q] = vusdotq_lane_s32(odd.at[q], second, last, 1);
    }
  }
}

template <bool kInt16, int R, int P>
JAXTAP_INLINE void add_products(const Rows<R>& rows, const uint8_t* qvalues, int64_t, int64_t k,
                                Sums (&acc)[R][P]) {
  static_assert(P == 1 && !kInt16, "nothing else is asked for here");
  if constexpr (R == 1) {
    add_rows(rows, qvalues, k, acc);
  } else {
    // Both rows of a column, then those of the next.
    int32x4_t pairs[R / 2][8];
#pragma GCC unroll 3
    for (int p = 0; p < R / 2; ++p) {
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const int32x4_t upper = acc[2 * p][0].at[q], lower = acc[2 * p + 1][0].at[q];
        pairs[p][2 * q] = vzip1q_s32(upper, lower);
        pairs[p][2 * q + 1] = vzip2q_s32(upper, lower);
      }
    }
    Sums& odd = acc[R - 1][0];
    int64_t i = 0;
    for (; i + 8 <= k; i += 8, qvalues += 128) {
      __builtin_prefetch(qvalues + kAhead);
      __builtin_prefetch(qvalues + kAhead + 64);
      add_pairs<true>(rows, i, qvalues, pairs, odd);
    }
    if (i < k) add_pairs<false>(rows, i, qvalues, pairs, odd);
#pragma GCC unroll 3
    for (int p = 0; p < R / 2; ++p) {
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const int32x4_t first = pairs[p][2 * q], second = pairs[p][2 * q + 1];
        acc[2 * p][0].at[q] = vuzp1q_s32(first, second);
        acc[2 * p + 1][0].at[q] = vuzp2q_s32(first, second);
      }
    }
  }
}

#include "matmul/tile.inl"
#include "matmul/stream.inl"
#include "matmul/table.inl"

}  // namespace

const Kernels& neon_i8mm_kernels() {
  static constexpr Kernels kKernels = own_kernels(4, 512, stream, kSignedSums);
  return kKernels;
}

}  // namespace jaxtap
