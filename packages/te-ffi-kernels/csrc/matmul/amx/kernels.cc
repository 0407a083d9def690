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
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/epilogue.inl"
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

// 16 numbers. Compilers have these vectors on every machine.
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

template <typename Vector>
JAXTAP_INLINE void load(const void* from, Vector* to) {
  __builtin_memcpy(to, from, 64);
}

#include "matmul/amx/exact.inl"
#include "matmul/amx/scaled.inl"
#include "matmul/table.inl"

}  // namespace

const Kernels& amx_kernels() {
  static constexpr Kernels kKernels = [] {
    Kernels k = own_kernels(2, 2048, nullptr, false);
    k.task_steps = 120000;
    k.least_rows = 16;
    k.expands_signed = true;
    k.expand_panel = expand_panel<true>;
    k.release = release;
    return k;
  }();
  return kKernels;
}

}  // namespace jaxtap
