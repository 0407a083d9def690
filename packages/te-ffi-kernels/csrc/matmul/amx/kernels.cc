// Kernels on AMX int8 tiles. Compile with:
//   -O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c
//   -mprefer-vector-width=512
// or, to test without AMX, with -O3 -ffp-contract=off -DJAXTAP_EMULATE_AMX alone.
//
// A panel's codes are B tiles as they lie: 16 rows of 64 bytes, each 16 columns of 4 rows of K.
#include "matmul/kernels.h"

#include "common/convert.h"
#include "matmul/amx/shape.h"
#include "matmul/halves.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"

// The most rows of K per instruction that divide all segments: 64 but for odd groups.
int64_t chunk_of(int64_t segment) {
  int64_t chunk = 64;
  while (segment % chunk != 0) chunk -= 4;
  return chunk;
}

// Operands of one block, of up to 32 rows and 2 panels.
struct Operands {
  const int8_t* x;
  int64_t x_stride;
  const uint8_t* codes;
  int64_t codes_stride;
};

template <bool kTwoRows, bool kTwoPanels>
void add_products(const Operands& o, int64_t k, int64_t chunk) {
  for (int64_t i = 0; i < k; i += chunk) {
    tile_load<6>(o.codes + 16 * i, 64);
    tile_load<4>(o.x + i, o.x_stride);
    tile_multiply<0, 4, 6>();
    if (kTwoPanels) {
      tile_load<7>(o.codes + o.codes_stride + 16 * i, 64);
      tile_multiply<1, 4, 7>();
    }
    if (kTwoRows) {
      tile_load<5>(o.x + 16 * o.x_stride + i, o.x_stride);
      tile_multiply<2, 5, 6>();
      if (kTwoPanels) tile_multiply<3, 5, 7>();
    }
  }
}

void add_products(const Operands& o, const Shape& shape, int64_t k) {
  const bool rows = shape.rows > 16, panels = shape.panels > 1;
  if (rows && panels) return add_products<true, true>(o, k, shape.chunk);
  if (rows) return add_products<true, false>(o, k, shape.chunk);
  if (panels) return add_products<false, true>(o, k, shape.chunk);
  return add_products<false, false>(o, k, shape.chunk);
}

void exact_block(const Tile& t, const Operands& o, const Shape& shape, int64_t r0, int64_t p0) {
  int32_t* sums = t.sums + r0 * t.sums_stride + 16 * p0;
  if (t.first) {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int32_t start = -t.offsets[(r0 + r) * t.offsets_stride];
      for (int64_t c = 0; c < 16 * shape.panels; ++c) sums[r * t.sums_stride + c] = start;
    }
  }
  load_sums(shape, sums, t.sums_stride);
  add_products(o, shape, t.k);
  store_sums(shape, sums, t.sums_stride);
}

template <bool kPaired>
void scaled_block(const Tile& t, Operands o, const Shape& shape, int64_t r0, int64_t p0) {
  alignas(64) int32_t sums[kRows * 32];
  constexpr int64_t kPlanes = kPaired ? 2 : 1;
  float* totals = t.totals + r0 / kPlanes * t.sums_stride + 16 * p0;
  for (int64_t r = 0; r < shape.rows / kPlanes; ++r) {
    for (int64_t c = 0; c < 16 * shape.panels; ++c) totals[r * t.sums_stride + c] = 0.0f;
  }
  const int32_t* offsets = t.offsets + r0 * t.offsets_stride;
  const float* x_scales =
      t.x_scales == nullptr ? nullptr : t.x_scales + r0 / kPlanes * t.offsets_stride;
  const uint8_t* scales = t.scales + p0 * t.scales_stride;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    zero_sums(shape);
    add_products(o, shape, count);
    store_sums(shape, sums, 32);
    for (int64_t p = 0; p < shape.panels; ++p) {
      float scale[16];
      __builtin_memcpy(scale, scales + p * t.scales_stride, 64);
      for (int64_t r = 0; r < shape.rows / kPlanes; ++r) {
        const int32_t* sum = sums + r * kPlanes * 32 + 16 * p;
        const int32_t* offset = offsets + r * kPlanes * t.offsets_stride;
        const float x_scale = x_scales == nullptr ? 1.0f : x_scales[r * t.offsets_stride];
        float* total = totals + r * t.sums_stride + 16 * p;
        for (int c = 0; c < 16; ++c) {
          const auto plane = [&](int64_t i) {
            const uint32_t found = static_cast<uint32_t>(sum[32 * i + c]);
            return static_cast<int32_t>(found - static_cast<uint32_t>(offset[i * t.offsets_stride]));
          };
          const float value =
              kPaired ? paired_sum(plane(0), plane(1), t.whole) : static_cast<float>(plane(0));
          total[c] += value * x_scale * scale[c];
        }
      }
    }
    ++offsets;
    if (x_scales != nullptr) ++x_scales;
    scales += t.scales_step;
    o.x += count;
    o.codes += 16 * count;
  }
}

template <typename Block>
void all_blocks(const Tile& t, int64_t chunk, const Block& block) {
  for (int64_t p = 0; p < t.panels; p += 2) {
    for (int64_t r = 0; r < t.rows; r += kRows) {
      Shape shape;
      shape.rows = t.rows - r < kRows ? t.rows - r : kRows;
      shape.panels = t.panels - p < 2 ? 1 : 2;
      shape.chunk = chunk;
      configure(shape);
      const Operands o{t.x + r * t.x_stride, t.x_stride, t.codes + p * t.codes_stride,
                       t.codes_stride};
      block(t, o, shape, r, p);
    }
  }
}

void exact8(const Tile& t) { all_blocks(t, chunk_of(t.k), exact_block); }

void scaled8(const Tile& t) { all_blocks(t, chunk_of(t.segment_k), scaled_block<false>); }

// Blocks have an even number of plane rows: pairs stay together.
void paired8(const Tile& t) { all_blocks(t, chunk_of(t.segment_k), scaled_block<true>); }

}  // namespace

const Kernels& amx_kernels() {
  static constexpr Kernels kKernels = {
      2,       1024,         16,             exact8, scaled8, paired8, expand_panel,
      nullptr, quantize_row, quantize_pairs, finish, release};
  return kKernels;
}

}  // namespace jaxtap
