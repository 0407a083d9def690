// What numbers.inl does, 64 numbers at a time, with the same results.

// body(i, used) for each 64 numbers from i on, with a bit for each that there is.
template <typename Body>
JAXTAP_INLINE void each_64(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) body(i, ~__mmask64{0});
  if (i < count) body(i, (__mmask64{1} << (count - i)) - 1);
}

// Four vectors of 64 numbers: those from 16 * part on, and 0 where there is none.
template <DType kType>
JAXTAP_INLINE __m512 load_part(const uint8_t* x, int64_t index, __mmask64 used, int part) {
  const int64_t at = index + 16 * part;
  const bool all = __builtin_constant_p(used) && used == ~__mmask64{0};
  const auto mask = static_cast<__mmask16>(used >> (16 * part));
  if (kType == DType::F32) {
    return all ? _mm512_loadu_ps(x + 4 * at) : _mm512_maskz_loadu_ps(mask, x + 4 * at);
  }
  const __m256i half = all ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 2 * at))
                           : _mm256_maskz_loadu_epi16(mask, x + 2 * at);
  if (kType == DType::F16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Stores 64 integers as bytes, from halves in the order in which _mm512_packs_epi32 leaves those of
// two parts.
JAXTAP_INLINE __m512i store_bytes(__m512i first, __m512i second, int8_t* out, __mmask64 used) {
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
  if (__builtin_constant_p(used) && used == ~__mmask64{0}) {
    _mm512_storeu_si512(out, bytes);
  } else {
    _mm512_mask_storeu_epi8(out, used, bytes);
  }
  return bytes;
}

template <DType kType>
inline uint32_t largest_bits(const uint8_t* x, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most[4] = {};
  each_64(count, [&](int64_t i, __mmask64 used) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m512i bits = _mm512_castps_si512(load_part<kType>(x, i, used, v));
      most[v] = _mm512_max_epu32(most[v], _mm512_and_si512(bits, magnitude));
    }
  });
  return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(most[0], most[1]),
                                                  _mm512_max_epu32(most[2], most[3])));
}

template <DType kType, bool kClips>
inline bool quantize_fast(const uint8_t* x, int64_t count, float reciprocal, int8_t* out) {
  constexpr int kLargerMagnitude = 0b1011;
  const __m512 by = _mm512_set1_ps(reciprocal);
  __m512 most[4] = {};  // distances of ratios from their quantized values
  each_64(count, [&](int64_t i, __mmask64 used) __attribute__((always_inline)) {
    __m512i whole[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      __m512 ratio = _mm512_mul_ps(load_part<kType>(x, i, used, v), by);
      if (kClips) {
        ratio = _mm512_max_ps(_mm512_min_ps(ratio, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f));
      }
      whole[v] = _mm512_cvtps_epi32(ratio);
      const __m512 rest = _mm512_sub_ps(ratio, _mm512_cvtepi32_ps(whole[v]));
      most[v] = _mm512_range_ps(most[v], rest, kLargerMagnitude);
    }
    store_bytes(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]),
                out + i, used);
  });
  const __m512 all =
      _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
  return _mm512_cmp_ps_mask(all, _mm512_set1_ps(kSafeRounding), _CMP_GT_OQ) == 0;
}

// 32 numbers times `by`, rounded, as 16 bits: in the order of _mm512_packs_epi32.
template <DType kType>
JAXTAP_INLINE __m512i fixed_half(const uint8_t* x, int64_t index, __mmask64 used, int half,
                                 __m512 by) {
  const __m512 first = _mm512_mul_ps(load_part<kType>(x, index, used, 2 * half), by);
  const __m512 second = _mm512_mul_ps(load_part<kType>(x, index, used, 2 * half + 1), by);
  return _mm512_packs_epi32(_mm512_cvtps_epi32(first), _mm512_cvtps_epi32(second));
}

template <DType kType>
inline void quantize_fixed(const uint8_t* x, int64_t count, float factor, int8_t* low, int8_t* high,
                           int32_t* low_sum, int32_t* high_sum) {
  const __m512 by = _mm512_set1_ps(factor);
  const __m512i half = _mm512_set1_epi16(128), ones = _mm512_set1_epi8(1);
  __m512i low_sums = _mm512_setzero_si512(), high_sums = low_sums;
  each_64(count, [&](int64_t i, __mmask64 used) __attribute__((always_inline)) {
    __m512i lower[2], upper[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i whole = fixed_half<kType>(x, i, used, h, by);
      upper[h] = _mm512_srai_epi16(_mm512_add_epi16(whole, half), 8);
      lower[h] = _mm512_sub_epi16(whole, _mm512_slli_epi16(upper[h], 8));
    }
    low_sums = _mm512_dpbusd_epi32(low_sums, ones, store_bytes(lower[0], lower[1], low + i, used));
    high_sums =
        _mm512_dpbusd_epi32(high_sums, ones, store_bytes(upper[0], upper[1], high + i, used));
  });
  *low_sum = _mm512_reduce_add_epi32(low_sums);
  *high_sum = _mm512_reduce_add_epi32(high_sums);
}

// The same to wide ones.
template <DType kType>
inline void quantize_int16(const uint8_t* x, int64_t count, float factor, int8_t* out) {
  const __m512 by = _mm512_set1_ps(factor);
  const __m512i parts = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  // 0, 2, 1, 3 of each four.
  const __m512i order = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
  each_64(count, [&](int64_t i, __mmask64 used) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i whole = fixed_half<kType>(x, i, used, h, by);
      const __m512i numbers =
          _mm512_permutexvar_epi64(parts, _mm512_shuffle_epi8(whole, order));
      _mm512_mask_storeu_epi16(out + 2 * (i + 32 * h), static_cast<__mmask32>(used >> (32 * h)),
                               numbers);
    }
  });
}

inline int32_t sum_of(const int8_t* values, int64_t count) {
  __m512i sums = _mm512_setzero_si512();
  each_64(count, [&](int64_t i, __mmask64 used) __attribute__((always_inline)) {
    sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1),
                               _mm512_maskz_loadu_epi8(used, values + i));
  });
  return _mm512_reduce_add_epi32(sums);
}
