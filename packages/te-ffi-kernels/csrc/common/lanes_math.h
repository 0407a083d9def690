// Functions of vectors of float32. As those, they have internal linkage.
#pragma once

#include "common/lanes.h"

namespace jaxtap::lanes::JAXTAP_ISA_NAMESPACE {
namespace {

// a > b ? a : b, so b where one of them is NaN; and the same with <.
JAXTAP_INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

JAXTAP_INLINE Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// a * b + c, rounded once where the instruction set can.
JAXTAP_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) && defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(JAXTAP_NEON)
  return same_bits<Floats>(vfmaq_f32(same_bits<float32x4_t>(c), same_bits<float32x4_t>(a),
                                     same_bits<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

JAXTAP_INLINE Floats fma(Floats a, Floats b, float c) { return fma(a, b, all(c)); }

JAXTAP_INLINE Floats square_root(Floats x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(x);
#elif defined(JAXTAP_NEON)
  return same_bits<Floats>(vsqrtq_f32(same_bits<float32x4_t>(x)));
#else
  Floats root;
  for (int i = 0; i < kLanes; ++i) root[i] = __builtin_sqrtf(x[i]);
  return root;
#endif
}

JAXTAP_INLINE float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
#endif
}

JAXTAP_INLINE float largest_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  }
  return x[0];
#endif
}

// e^x as vexp of vmath.h has it, and with the same properties.
JAXTAP_INLINE Floats exp(Floats x) {
  constexpr float kRound = 12582912.0f;
  // So written that NaN goes through.
  const Floats cut = min(all(89.0f), max(all(-104.0f), x));
  const Floats shifted = fma(cut, all(1.44269504088896341f), kRound);
  const Floats n = shifted - kRound;
  const Floats rest = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), cut));
  Floats p = all(1.9875691500e-4f);
  p = fma(p, rest, 1.3981999507e-3f);
  p = fma(p, rest, 8.3334519073e-3f);
  p = fma(p, rest, 4.1665795894e-2f);
  p = fma(p, rest, 1.6666665459e-1f);
  p = fma(p, rest, 5.0000001201e-1f);
  p = fma(p, rest * rest, rest) + 1.0f;
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  const Ints whole = same_bits<Ints>(shifted) - static_cast<int32_t>(0x4b400000);
  const Ints half = whole >> 1;
  const Floats first = same_bits<Floats>((half + 127) << 23);
  const Floats second = same_bits<Floats>((whole - half + 127) << 23);
  return p * first * second;
#endif
}

// log(1 + x) for x from 0 to 1, as vlog1p_to_one of vmath.h has it.
JAXTAP_INLINE Floats log1p_to_one(Floats x) {
  const Ints high = x > 0.41421356f;
  const Floats z = high ? (x - 1.0f) * 0.5f : x;
  Floats p = all(7.0376836292e-2f);
  p = fma(p, z, -1.1514610310e-1f);
  p = fma(p, z, 1.1676998740e-1f);
  p = fma(p, z, -1.2420140846e-1f);
  p = fma(p, z, 1.4249322787e-1f);
  p = fma(p, z, -1.6668057665e-1f);
  p = fma(p, z, 2.0000714765e-1f);
  p = fma(p, z, -2.4999993993e-1f);
  p = fma(p, z, 3.3333331174e-1f);
  const Floats squared = z * z;
  const Floats part = fma(p * squared, z, -0.5f * squared) + z;
  return high ? part + 0.693147180559945f : part;
}

}  // namespace
}  // namespace jaxtap::lanes::JAXTAP_ISA_NAMESPACE
