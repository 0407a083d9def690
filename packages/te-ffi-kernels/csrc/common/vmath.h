// Functions of float32 without branches, so that compilers vectorise loops over them.
//
// Every function has internal linkage: files that are compiled for different instruction sets must
// not share one copy.
#pragma once

#include <cstdint>

#include "common/convert.h"

namespace jaxtap {

// a * b + c, rounded once where the instruction set can.
JAXTAP_INLINE float vfma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return fmaf(a, b, c);
#elif defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x, to about 1 unit in the last place: 2^n times a polynomial of the rest, |rest| <= ln(2) / 2
// (the coefficients of Cephes' expf). Infinite above 88.72; 0 below -103.97, with subnormal results
// before that where the thread doesn't flush them. NaN stays NaN.
JAXTAP_INLINE float vexp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to whole numbers
  // So written that NaN goes through.
  const float low = x < -104.0f ? -104.0f : x;
  const float cut = low > 89.0f ? 89.0f : low;
  const float shifted = vfma(cut, 1.44269504088896341f, kRound);
  const float n = shifted - kRound;
  const float rest = vfma(n, 2.12194440e-4f, vfma(n, -0.693359375f, cut));
  float p = 1.9875691500e-4f;
  p = vfma(p, rest, 1.3981999507e-3f);
  p = vfma(p, rest, 8.3334519073e-3f);
  p = vfma(p, rest, 4.1665795894e-2f);
  p = vfma(p, rest, 1.6666665459e-1f);
  p = vfma(p, rest, 5.0000001201e-1f);
  p = vfma(p, rest * rest, rest) + 1.0f;
  // 2^n as two factors, since n is in [-150, 128].
  const int32_t whole = static_cast<int32_t>(float_bits(shifted) - float_bits(kRound));
  const int32_t half = whole >> 1;
  const float first = bits_float(static_cast<uint32_t>(half + 127) << 23);
  const float second = bits_float(static_cast<uint32_t>(whole - half + 127) << 23);
  return p * first * second;
}

// log(1 + x) for x from 0 to 1: Cephes' logf, whose polynomial is good for z = x up to sqrt(2) - 1,
// and above for z = (x - 1) / 2, which gives log((1 + x) / 2).
JAXTAP_INLINE float vlog1p_to_one(float x) {
  const bool high = x > 0.41421356f;
  const float z = high ? (x - 1.0f) * 0.5f : x;
  float p = 7.0376836292e-2f;
  p = vfma(p, z, -1.1514610310e-1f);
  p = vfma(p, z, 1.1676998740e-1f);
  p = vfma(p, z, -1.2420140846e-1f);
  p = vfma(p, z, 1.4249322787e-1f);
  p = vfma(p, z, -1.6668057665e-1f);
  p = vfma(p, z, 2.0000714765e-1f);
  p = vfma(p, z, -2.4999993993e-1f);
  p = vfma(p, z, 3.3333331174e-1f);
  const float squared = z * z;
  const float part = vfma(p * squared, z, -0.5f * squared) + z;
  return high ? part + 0.693147180559945f : part;
}

}  // namespace jaxtap
