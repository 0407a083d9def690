// Kernels on AMX bfloat16 tiles. Compile as kernels.cc, with -mavx512bf16.
#include "matmul/floats.h"

#include <cstring>

#include "common/convert.h"
#include "matmul/amx/shape.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

// By definition: what is not finite, and groups that are not whole vectors.
void round_group(const uint8_t* x, int64_t count, int8_t* qvalues, uint16_t* out) {
  float scale;
  int32_t offset;
  Quantize q{};
  q.x = x;
  q.x_dtype = DType::BF16;
  q.k = q.padded_k = q.segment_k = count;
  q.digits = 1;
  q.out = qvalues;
  q.offsets = &offset;
  q.scale = &scale;
  amx_kernels().quantize(q);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = f32_to_bf16(static_cast<float>(qvalues[i]) * scale);
  }
}

#if defined(__AVX512BF16__)

// Returns whether the group is finite; else `out` is not written. `count` is a multiple of 16.
bool round_finite(const uint8_t* x, int64_t count, uint16_t* out) {
  const auto load = [&](int64_t i) {
    const auto* from = reinterpret_cast<const __m256i*>(x + 2 * i);
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
  };
  // Of magnitudes, as integers, so that NaN is the largest.
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    largest = _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(load(i))));
  }
  const auto bits = static_cast<uint32_t>(_mm512_reduce_max_epi32(largest));
  if (bits >= 0x7f800000u) return false;
  const float ratio = bits_float(bits) * (1.0f / 127.0f);
  const __m512 scale = _mm512_set1_ps(ratio < 0x1p-126f ? 0x1p-126f : ratio);
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 qvalue = _mm512_roundscale_ps(_mm512_div_ps(load(i), scale),
                                             _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const auto rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(qvalue, scale));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), rounded);
  }
  return true;
}

#endif

void round_row(const RoundRow& r) {
  for (int64_t i = 0; i < r.k; i += r.group) {
#if defined(__AVX512BF16__)
    if (r.group % 16 == 0 && round_finite(r.x + 2 * i, r.group, r.out + i)) continue;
#endif
    round_group(r.x + 2 * i, r.group, r.qvalues, r.out + i);
  }
}

#include "matmul/bfloat16.inl"

void tile_rows(const ArrangeRows& t) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const uint8_t* from = t.x + r * t.x_stride;
    uint16_t* to = t.out + r / kRowTile * t.steps * kTileNumbers + r % kRowTile * kStep;
    for (int64_t i = 0; i < t.steps; ++i, from += 2 * kStep, to += kTileNumbers) {
      const int64_t left = t.k - i * kStep;
      if (left >= kStep) {
        std::memcpy(to, from, 2 * kStep);
      } else {
        std::memset(to, 0, 2 * kStep);
        std::memcpy(to, from, static_cast<size_t>(2 * left));
      }
    }
  }
}

template <bool kTwoRows, bool kTwoPanels>
inline void add_products(const uint16_t* x, const uint16_t* w, int64_t w_stride, int64_t steps) {
  const int64_t x_stride = steps * kTileNumbers;
  for (int64_t i = 0; i < steps; ++i, x += kTileNumbers, w += kTileNumbers) {
    tile_load<6>(w, 64);
    tile_load<4>(x, 64);
    tile_multiply_bf16<0, 4, 6>();
    if (kTwoPanels) {
      tile_load<7>(w + w_stride, 64);
      tile_multiply_bf16<1, 4, 7>();
    }
    if (kTwoRows) {
      tile_load<5>(x + x_stride, 64);
      tile_multiply_bf16<2, 5, 6>();
      if (kTwoPanels) tile_multiply_bf16<3, 5, 7>();
    }
  }
}

void multiply(const FloatTile& t) {
  for (int64_t p = 0; p < t.panels; p += 2) {
    for (int64_t r = 0; r < t.rows; r += kRows) {
      Shape shape;
      shape.rows = t.rows - r < kRows ? t.rows - r : kRows;
      shape.panels = t.panels - p < 2 ? 1 : 2;
      shape.chunk = 2 * kStep;
      configure(shape);
      float* sums = t.sums + r * t.sums_stride + 16 * p;
      if (t.first) {
        zero_sums(shape);
      } else {
        load_sums(shape, sums, t.sums_stride);
      }
      const uint16_t* x = t.x + r / kRowTile * t.steps * kTileNumbers;
      const bool rows = shape.rows > kRowTile, panels = shape.panels > 1;
      auto* run = rows ? panels ? add_products<true, true> : add_products<true, false>
                  : panels ? add_products<false, true>
                           : add_products<false, false>;
      run(x, t.w + p * t.w_stride, t.w_stride, t.steps);
      store_sums(shape, sums, t.sums_stride);
    }
  }
}

}  // namespace

const FloatKernels& amx_float_kernels() {
  static const FloatKernels kKernels = [] {
    FloatKernels k;
    k.round_row = round_row;
    k.arrange_rows = tile_rows;
    k.dequantize = dequantize;
    k.multiply = multiply;
    k.epilogue = amx_kernels().epilogue;
    k.release = release;
    return k;
  }();
  return kKernels;
}

}  // namespace jaxtap
