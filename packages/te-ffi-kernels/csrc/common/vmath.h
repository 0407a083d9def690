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
#if defined(__FMA__) || defined(__aarch64__)
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

}  // namespace jaxtap
