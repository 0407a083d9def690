// Kernels on NEON with SDOT, of Armv8.2 and later: four products of signed bytes are added in each
// lane. Compile with: -O3 -ffp-contract=off -march=armv8.2-a+dotprod
//
// Quantized values lie as unsigned bytes, which no instruction here multiplies with signed ones: they
// become signed, so the sums are right without offsets.
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

constexpr int kTileRows = 5, kTilePanels = 1, kScaledPanels = 1;  // 20 of 32 registers hold sums
constexpr bool kSignedSums = true;

// Digit rows as they lie, and what makes quantized values signed: nothing, where they are.
template <int R>
struct Rows {
  const int8_t* x;
  int64_t stride;
  uint8x16_t flip;

  Rows from(int64_t bytes) const { return {x + bytes, stride, flip}; }
};

template <int R>
JAXTAP_INLINE Rows<R> rows_of(const Tile& t, int64_t row) {
  const uint8_t flip = t.offsets == nullptr ? 0 : 0x80;
  return {t.x + row * t.x_stride, t.x_stride, vdupq_n_u8(flip)};
}

template <int R>
JAXTAP_INLINE Rows<R> run_of(const Tile& t, const Rows<R>& rows, int64_t run) {
  return rows.from(t.x_runs[run]);
}

#include "matmul/neon/lines.inl"

template <int kLine, bool kLast>
JAXTAP_INLINE void add_line(Sums& sums, uint8x16_t bytes, const Eight& x) {
  sums.at[kLine] = vdotq_lane_s32(sums.at[kLine], vreinterpretq_s8_u8(bytes), x, kLast);
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

const Kernels& neon_dot_kernels() {
  static constexpr Kernels kKernels = own_kernels(4, 512, stream, kSignedSums);
  return kKernels;
}

}  // namespace jaxtap
