// What rotate.inl does, with the first steps in registers and the same results.

// Numbers kStep apart become their sum and their difference.
template <int kStep>
JAXTAP_INLINE __m512 mix_within(__m512 x) {
  constexpr auto kSecond = static_cast<__mmask16>(kStep == 1   ? 0xaaaa
                                                  : kStep == 2 ? 0xcccc
                                                  : kStep == 4 ? 0xf0f0
                                                               : 0xff00);
  const __m512 other = kStep == 1   ? _mm512_permute_ps(x, 0b10110001)
                       : kStep == 2 ? _mm512_permute_ps(x, 0b01001110)
                       : kStep == 4 ? _mm512_shuffle_f32x4(x, x, 0b10110001)
                                    : _mm512_shuffle_f32x4(x, x, 0b01001110);
  return _mm512_mask_sub_ps(_mm512_add_ps(other, x), kSecond, other, x);
}

// All steps up to 16 * kVectors apart, of as many numbers at a time.
template <DType kType, int kVectors>
inline void rotate_vectors(const Rotate& r) {
  const bool last = r.block <= 16 * kVectors;
  const __m512 factor = _mm512_set1_ps(r.factor);
  for (int64_t i = 0; i < r.k; i += 16 * kVectors) {
    __m512 x[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = i + 16 * v, left = r.k - at;
      const auto used = static_cast<__mmask16>(left < 16 ? (1 << left) - 1 : 0xffff);
      const __m128i signs = _mm_maskz_loadu_epi8(used, r.signs + at);
      const __m512 numbers = load_part<kType>(r.x, at, used, 0);
      x[v] = _mm512_mul_ps(numbers, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(signs)));
      x[v] = mix_within<1>(x[v]);
      if (r.block > 2) x[v] = mix_within<2>(x[v]);
      if (r.block > 4) x[v] = mix_within<4>(x[v]);
      if (r.block > 8) x[v] = mix_within<8>(x[v]);
    }
#pragma GCC unroll 3
    for (int step = 1; step < kVectors; step *= 2) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        if ((v & step) != 0) continue;
        const __m512 first = x[v], second = x[v + step];
        x[v] = _mm512_add_ps(first, second);
        x[v + step] = _mm512_sub_ps(first, second);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(r.out + i + 16 * v, last ? _mm512_mul_ps(x[v], factor) : x[v]);
    }
  }
}

template <DType kType>
inline void rotate_numbers(const Rotate& r) {
  if (r.block <= 16) return rotate_vectors<kType, 1>(r);
  if (r.block == 32) return rotate_vectors<kType, 2>(r);
  if (r.block == 64) return rotate_vectors<kType, 4>(r);
  rotate_vectors<kType, 8>(r);
  const __m512 factor = _mm512_set1_ps(r.factor);
  for (int64_t step = 128; step < r.block; step *= 2) {
    const bool last = 2 * step == r.block;
    for (int64_t i = 0; i < r.k; i += 2 * step) {
      for (int64_t j = i; j < i + step; j += 16) {
        const __m512 first = _mm512_loadu_ps(r.out + j), second = _mm512_loadu_ps(r.out + j + step);
        const __m512 sum = _mm512_add_ps(first, second), rest = _mm512_sub_ps(first, second);
        _mm512_storeu_ps(r.out + j, last ? _mm512_mul_ps(sum, factor) : sum);
        _mm512_storeu_ps(r.out + j + step, last ? _mm512_mul_ps(rest, factor) : rest);
      }
    }
  }
}
