// Vectors of 128 bits, four for the 16 columns of a panel: what tile.inl wants of all sets of Arm.

constexpr int64_t kAhead = 1024;  // bytes

constexpr int kFewRows = 2;
template <int kDigits>
constexpr bool kTotalsStay = false;

struct Sums {
  int32x4_t at[4];
};

struct Floats {
  float32x4_t at[4];

  friend Floats operator+(const Floats& a, const Floats& b) {
    Floats sum;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) sum.at[q] = vaddq_f32(a.at[q], b.at[q]);
    return sum;
  }
  friend Floats operator*(const Floats& a, const Floats& b) {
    Floats product;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) product.at[q] = vmulq_f32(a.at[q], b.at[q]);
    return product;
  }
  friend Floats operator*(const Floats& a, float b) {
    Floats product;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) product.at[q] = vmulq_n_f32(a.at[q], b);
    return product;
  }
};

JAXTAP_INLINE Sums sums_of(int32_t x) {
  const int32x4_t all = vdupq_n_s32(x);
  return {{all, all, all, all}};
}

JAXTAP_INLINE Sums load_sums(const int32_t* from) {
  return {{vld1q_s32(from), vld1q_s32(from + 4), vld1q_s32(from + 8), vld1q_s32(from + 12)}};
}

JAXTAP_INLINE void store_sums(int32_t* to, const Sums& x) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) vst1q_s32(to + 4 * q, x.at[q]);
}

JAXTAP_INLINE Floats load_floats(const void* from) {  // at any address
  Floats x;
  __builtin_memcpy(&x, from, 64);
  return x;
}

JAXTAP_INLINE void store_floats(void* to, const Floats& x) { __builtin_memcpy(to, &x, 64); }

JAXTAP_INLINE Floats to_floats(const Sums& x) {
  Floats floats;
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) floats.at[q] = vcvtq_f32_s32(x.at[q]);
  return floats;
}

template <bool kFitsInt32>
JAXTAP_INLINE Floats two_digits(const Sums& low, const Sums& high) {
  if (!kFitsInt32) return to_floats(high) * 256.0f + to_floats(low);
  Sums both;
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) both.at[q] = vaddq_s32(vshlq_n_s32(high.at[q], 8), low.at[q]);
  return to_floats(both);
}

// Four numbers of x, and zeros after them.
JAXTAP_INLINE int8x8_t four_of(const int8_t* x) {
  uint32_t word;
  __builtin_memcpy(&word, x, 4);
  return vcreate_s8(word);
}
