// The formats of arrays and quantized values, as types for templates of loops. Of one instruction
// set: nothing here may be shared with files that are compiled for another.
#pragma once

#include <cstdint>

#include "common/convert.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int32_t kInf = 0x7f800000;
constexpr int32_t kLeastNormal = 0x00800000;

// Bits of |x|, which have its order; 0 for NaN.
JAXTAP_INLINE int32_t magnitude(float x) {
  const int32_t bits = static_cast<int32_t>(float_bits(x) & 0x7fffffffu);
  return bits > kInf ? 0 : bits;
}

// Subnormal numbers count as zero, as XLA's threads take them.
JAXTAP_INLINE int32_t without_subnormal(int32_t magnitude) {
  return magnitude < kLeastNormal ? 0 : magnitude;
}

struct F32 {
  using Type = float;
  JAXTAP_INLINE float load(float x) { return x; }
  JAXTAP_INLINE float store(float x) { return x; }
};

struct BF16 {
  using Type = uint16_t;
  JAXTAP_INLINE float load(uint16_t x) { return bf16_to_f32(x); }
  JAXTAP_INLINE uint16_t store(float x) { return f32_to_bf16(x); }
};

struct F16 {
  using Type = uint16_t;
  JAXTAP_INLINE float load(uint16_t x) { return f16_to_f32(x); }
  JAXTAP_INLINE uint16_t store(float x) { return f32_to_f16(x); }
};

// Saturates, and rounds half to even, to `kMantissa` bits and exponents down to that of
// 2^(kLeast - 127), below which the step stays what it is there. Adding a power of two that is
// 20 or so binades higher leaves the rounded multiple of the step at the end of the sum.
template <int kMantissa, int kLeast, uint32_t kMost>
JAXTAP_INLINE uint8_t encode_float8(float x) {
  constexpr int32_t kExponents = 0x7f800000, kLow = kLeast << 23;
  const int32_t bits = static_cast<int32_t>(float_bits(x));
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t cut = magnitude < static_cast<int32_t>(kMost) ? magnitude : kMost;
  const int32_t above = (cut & kExponents) - kLow;
  const int32_t binade = above > 0 ? above : 0;
  const int32_t high = binade + kLow + ((23 - kMantissa) << 23);
  const float sum = bits_float(static_cast<uint32_t>(cut)) +
                    bits_float(static_cast<uint32_t>(high));
  const int32_t multiple = static_cast<int32_t>(float_bits(sum)) - high;
  const int32_t qvalue = ((binade >> (23 - kMantissa)) + multiple) | ((bits >> 24) & 0x80);
  return static_cast<uint8_t>(magnitude > kInf ? 0x7f : qvalue);
}

// The largest number of both formats of float8 is 1.75 * 2^kExponent.
struct E4M3 {
  static constexpr int kExponent = 8;
  JAXTAP_INLINE uint8_t encode(float x) {
    return encode_float8<3, 121, 0x43e00000>(x);
  }
  JAXTAP_INLINE float decode(uint8_t qvalue) {
    return f8e4m3fn_to_f32(qvalue);
  }
};

struct E5M2 {
  static constexpr int kExponent = 15;
  JAXTAP_INLINE uint8_t encode(float x) {
    return encode_float8<2, 113, 0x47600000>(x);
  }
  JAXTAP_INLINE float decode(uint8_t qvalue) {
    return f8e5m2_to_f32(qvalue);
  }
};

struct Int8 {
  static constexpr int kExponent = 6;
  JAXTAP_INLINE uint8_t encode(float x) {
    const float low = x > -127.0f ? x : -127.0f;
    const float cut = low < 127.0f ? low : 127.0f;
    // The sum's unit is 1, so it rounds half to even, and its last byte is the quantized value.
    const uint32_t bits = float_bits(cut + 12582912.0f);
    return static_cast<uint8_t>(x == x ? bits : 0u);
  }
  JAXTAP_INLINE float decode(uint8_t qvalue) {
    return static_cast<float>(static_cast<int8_t>(qvalue));
  }
};

// A power of two of float32 as the product of two that aren't subnormal.
struct Power {
  float factor;
  float half;
};

// 2^-(scale - 127).
JAXTAP_INLINE Power inverse(int32_t scale) {
  const bool low = scale >= 254;
  return {bits_float(static_cast<uint32_t>(low ? 1 : 254 - scale) << 23), low ? 0.5f : 1.0f};
}

// 2^(scale - 127); 255 is NaN.
JAXTAP_INLINE Power power(int32_t scale) {
  const uint32_t bits = static_cast<uint32_t>(scale == 0 ? 1 : scale) << 23;
  return {bits_float(scale == 255 ? 0x7fc00000u : bits), scale == 0 ? 0.5f : 1.0f};
}

// The scale of an MX block: the least power of two with which its largest magnitude is not beyond
// the format's largest number. 254 for infinity and 0 for zero, as Transformer Engine has it.
template <class Format>
JAXTAP_INLINE int32_t block_scale(int32_t absmax) {
  const int32_t up = (absmax & 0x7fffff) > 0x600000 ? 1 : 0;  // above 1.75
  const int32_t scale = (absmax >> 23) - Format::kExponent + up;
  const int32_t cut = scale < 0 ? 0 : scale;
  return absmax >= kInf ? 254 : cut;
}

}  // namespace
}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
