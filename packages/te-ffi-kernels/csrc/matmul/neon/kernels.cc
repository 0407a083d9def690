// Kernels on NEON, without instructions for products of bytes: what processors before Armv8.2 have.
// Compile with: -O3 -ffp-contract=off
//
// Bytes are widened to 16 bits, and multiplied with numbers of x by lane.
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

constexpr int kTileRows = 4, kTilePanels = 1, kScaledPanels = 1;  // 16 of 32 registers hold sums
constexpr bool kSignedSums = false;

using Eight = int16x8_t;

JAXTAP_INLINE Eight eight_of(int8x8_t x) { return vmovl_s8(x); }

// The 16 columns of each of four rows of K.
struct Lines {
  uint8x16x4_t all;

  uint8x16_t at(int line) const { return all.val[line]; }
};

JAXTAP_INLINE Lines lines_at(const uint8_t* from) { return {vld4q_u8(from)}; }

template <int kLine, bool kLast>
JAXTAP_INLINE void add_line(Sums& sums, uint8x16_t bytes, const Eight& x) {
  constexpr int kLane = kLine + (kLast ? 4 : 0);
  const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
  const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(bytes));
  sums.at[0] = vmlal_laneq_s16(sums.at[0], vget_low_s16(low), x, kLane);
  sums.at[1] = vmlal_high_laneq_s16(sums.at[1], low, x, kLane);
  sums.at[2] = vmlal_laneq_s16(sums.at[2], vget_low_s16(high), x, kLane);
  sums.at[3] = vmlal_high_laneq_s16(sums.at[3], high, x, kLane);
}

#include "matmul/neon/products.inl"

template <bool kInt16, int R, int P>
JAXTAP_INLINE void add_products(const Rows<R>& rows, const uint8_t* qvalues, int64_t, int64_t k,
                                Sums (&acc)[R][P]) {
  static_assert(P == 1 && !kInt16, "nothing else is asked for here");
  add_rows(rows, qvalues, k, acc);
}

#include "matmul/tile.inl"
#include "matmul/stream.inl"
#include "matmul/table.inl"

}  // namespace

const Kernels& neon_kernels() {
  static constexpr Kernels kKernels = own_kernels(4, 512, stream, kSignedSums);
  return kKernels;
}

}  // namespace jaxtap
