// Scales of 16 bits as floats, by the instruction of each instruction set.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "common/convert.h"

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

// Of `bits` bits each.
JAXTAP_INLINE void load_scales(const uint8_t* from, int bits, float* out) {
  if (bits == 16) {
    load_half_scales(from, out);
  } else {
    __builtin_memcpy(out, from, 4 * 32);
  }
}

}  // namespace jaxtap
