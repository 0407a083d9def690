// Vectors of 256 bits, two for the 16 columns of a panel: what tile.inl wants of AVX2 and AVX-VNNI.

constexpr int64_t kAhead = 1024;  // bytes

JAXTAP_INLINE __m256i load(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

JAXTAP_INLINE __m256i broadcast4(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

struct Sums {
  __m256i half[2];
};

struct Floats {
  __m256 half[2];

  friend Floats operator+(const Floats& a, const Floats& b) {
    return {_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])};
  }
  friend Floats operator*(const Floats& a, const Floats& b) {
    return {_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])};
  }
  friend Floats operator*(const Floats& a, float b) {
    const __m256 by = _mm256_set1_ps(b);
    return {_mm256_mul_ps(a.half[0], by), _mm256_mul_ps(a.half[1], by)};
  }
};

JAXTAP_INLINE Sums sums_of(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

JAXTAP_INLINE Sums load_sums(const int32_t* from) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

JAXTAP_INLINE void store_sums(int32_t* to, const Sums& x) {
  auto* halves = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, x.half[0]);
  _mm256_storeu_si256(halves + 1, x.half[1]);
}

JAXTAP_INLINE Floats load_floats(const void* from) {
  const auto* floats = static_cast<const float*>(from);
  return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + 8)};
}

JAXTAP_INLINE void store_floats(void* to, const Floats& x) {
  auto* floats = static_cast<float*>(to);
  _mm256_storeu_ps(floats, x.half[0]);
  _mm256_storeu_ps(floats + 8, x.half[1]);
}

JAXTAP_INLINE Floats to_floats(const Sums& x) {
  return {_mm256_cvtepi32_ps(x.half[0]), _mm256_cvtepi32_ps(x.half[1])};
}

template <bool kFitsInt32>
JAXTAP_INLINE Floats two_digits(const Sums& low, const Sums& high) {
  if (!kFitsInt32) return to_floats(high) * 256.0f + to_floats(low);
  Sums both;
  for (int h = 0; h < 2; ++h) {
    both.half[h] = _mm256_add_epi32(_mm256_slli_epi32(high.half[h], 8), low.half[h]);
  }
  return to_floats(both);
}
