// Kernels on AMX int8 tiles. Compile with:
//   -O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c
//   -mprefer-vector-width=512
// or, to test without AMX, with -O3 -ffp-contract=off -DJAXTAP_EMULATE_AMX alone.
//
// A panel's quantized values are B tiles as they lie: 16 rows of 64 bytes, each 16 columns of 4
// rows of K.
#include "matmul/kernels.h"

#include "common/convert.h"
#include "matmul/amx/shape.h"
#include "matmul/halves.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/finish.inl"
#include "matmul/rotate.inl"

// The most rows of K per instruction that divide all segments: 64 but for odd groups.
int64_t chunk_of(int64_t segment) {
  int64_t chunk = 64;
  while (segment % chunk != 0) chunk -= 4;
  return chunk;
}

// Operands of matmuls of rows of x and panels.
struct Operands {
  const int8_t* x;
  int64_t x_stride;
  const uint8_t* qvalues;
  int64_t qvalues_stride;
};

// kC += kA times kB.
template <bool kSigned, int kC, int kA, int kB>
JAXTAP_INLINE void multiply() {
  kSigned ? tile_multiply_signed<kC, kA, kB>() : tile_multiply<kC, kA, kB>();
}

template <bool kSigned, bool kTwoRows, bool kTwoPanels>
JAXTAP_INLINE void add_products(const Operands& o, int64_t k, int64_t chunk) {
  for (int64_t i = 0; i < k; i += chunk) {
    tile_load<6>(o.qvalues + 16 * i, 64);
    tile_load<4>(o.x + i, o.x_stride);
    multiply<kSigned, 0, 4, 6>();
    if (kTwoPanels) {
      tile_load<7>(o.qvalues + o.qvalues_stride + 16 * i, 64);
      multiply<kSigned, 1, 4, 7>();
    }
    if (kTwoRows) {
      tile_load<5>(o.x + 16 * o.x_stride + i, o.x_stride);
      multiply<kSigned, 2, 5, 6>();
      if (kTwoPanels) multiply<kSigned, 3, 5, 7>();
    }
  }
}

template <bool kSigned>
void add_products(const Operands& o, const Shape& shape, int64_t k) {
  const bool rows = shape.rows > 16, panels = shape.panels > 1;
  if (rows && panels) return add_products<kSigned, true, true>(o, k, shape.chunk);
  if (rows) return add_products<kSigned, true, false>(o, k, shape.chunk);
  if (panels) return add_products<kSigned, false, true>(o, k, shape.chunk);
  return add_products<kSigned, false, false>(o, k, shape.chunk);
}

Operands operands_at(const Tile& t, int64_t r, int64_t p) {
  return {t.x + r * t.x_stride, t.x_stride, t.qvalues + p * t.qvalues_stride, t.qvalues_stride};
}

// Up to 32 rows by 2 panels.
void exact_block(const Tile& t, const Shape& shape, int64_t r0, int64_t p0) {
  int32_t* sums = t.sums + r0 * t.sums_stride + 16 * p0;
  if (t.first) {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int32_t start = t.offsets == nullptr ? 0 : -t.offsets[(r0 + r) * t.offsets_stride];
      for (int64_t c = 0; c < 16 * shape.panels; ++c) sums[r * t.sums_stride + c] = start;
    }
  }
  configure(shape);
  load_sums(shape, sums, t.sums_stride);
  const Operands o = operands_at(t, r0, p0);
  t.offsets == nullptr ? add_products<true>(o, shape, t.k) : add_products<false>(o, shape, t.k);
  store_sums(shape, sums, t.sums_stride);
}

void exact8(const Tile& t) {
  const int64_t chunk = chunk_of(t.k);
  for (int64_t p = 0; p < t.panels; p += 2) {
    for (int64_t r = 0; r < t.rows; r += kRows) {
      Shape shape;
      shape.rows = t.rows - r < kRows ? t.rows - r : kRows;
      shape.panels = t.panels - p < 2 ? 1 : 2;
      shape.chunk = chunk;
      exact_block(t, shape, r, p);
    }
  }
}

#include "matmul/amx/scaled.inl"

}  // namespace

const Kernels& amx_kernels() {
  static constexpr Kernels kKernels = {
      2,       1024,            16,      true,    false,      exact8,       scaled8,        paired8,
      nullptr, expand_panel<8>, nullptr, nullptr, rotate_row, quantize_row, quantize_pairs, finish,
      release};
  return kKernels;
}

}  // namespace jaxtap
