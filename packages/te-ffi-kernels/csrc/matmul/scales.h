// Scales of panels of 4 bits as floats, by the instructions of each instruction set.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "common/convert.h"
#include "common/packed.h"

namespace jaxtap {

// Of the 32 columns of a panel. `from` may be unaligned.
JAXTAP_INLINE void load_half_scales(const uint8_t* from, float* out) {
#if defined(__AVX512F__)
  for (int c = 0; c < 32; c += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * c));
    _mm512_storeu_ps(out + c, _mm512_cvtph_ps(half));
  }
#elif defined(__F16C__)
  for (int c = 0; c < 32; c += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * c));
    _mm256_storeu_ps(out + c, _mm256_cvtph_ps(half));
  }
#else
  for (int c = 0; c < 32; ++c) {
    uint16_t half;
    __builtin_memcpy(&half, from + 2 * c, 2);
    out[c] = f16_to_f32(half);
  }
#endif
}

// float8_e4m3fn, times a float of each column. NaN has none of the bits of another NaN: the float of
// a column that has one is NaN.
JAXTAP_INLINE void load_e4m3_scales(const uint8_t* from, const float* columns, float* out) {
  // As float16 these bits are 2 ** -8 of the number.
#if defined(__AVX512BW__)
  const __m512i bytes =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i number = _mm512_and_si512(_mm512_slli_epi16(bytes, 7), _mm512_set1_epi16(0x3f80));
  const __m512i sign = _mm512_slli_epi16(bytes, 8), top = _mm512_set1_epi16(INT16_MIN);
  const __m512i both = _mm512_ternarylogic_epi32(number, sign, top, 0xf8);  // number | sign & top
  const __m256i halves[2] = {_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1)};
  for (int i = 0; i < 2; ++i) {
    const __m512 scales = _mm512_mul_ps(_mm512_cvtph_ps(halves[i]), _mm512_set1_ps(256.0f));
    _mm512_storeu_ps(out + 16 * i, _mm512_mul_ps(scales, _mm512_loadu_ps(columns + 16 * i)));
  }
#else
  uint8_t halves[64];
  for (int c = 0; c < 32; ++c) {
    const auto byte = static_cast<uint16_t>(from[c]);
    const auto half = static_cast<uint16_t>((byte << 7 & 0x3f80) | (byte << 8 & 0x8000));
    __builtin_memcpy(halves + 2 * c, &half, 2);
  }
  load_half_scales(halves, out);
  for (int c = 0; c < 32; ++c) out[c] = out[c] * 256.0f * columns[c];
#endif
}

// Of a group of a panel, without the factor of the table: `from` is where they begin.
JAXTAP_INLINE void load_scales(const uint8_t* panel, const PanelLayout& layout, const uint8_t* from,
                               float* out) {
  switch (layout.scale_kind) {
    case ScaleKind::kF32:
      __builtin_memcpy(out, from, 4 * 32);
      break;
    case ScaleKind::kF16:
      load_half_scales(from, out);
      break;
    case ScaleKind::kE8M0:
      for (int c = 0; c < 32; ++c) out[c] = e8m0_to_f32(from[c]);
      break;
    case ScaleKind::kE4M3: {
      float columns[32];
      __builtin_memcpy(columns, panel + kPanelHeader, sizeof(columns));
      load_e4m3_scales(from, columns, out);
      break;
    }
  }
}

}  // namespace jaxtap
