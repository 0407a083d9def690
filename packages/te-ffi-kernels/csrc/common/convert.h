// Conversions between float32 and narrower floats, without branches, so that compilers vectorise
// loops over them.
//
// All round to nearest, half to even, and treat numbers beyond the format as a cast of JAX does. NaN
// stays NaN.
//
// Every function has internal linkage: files that are compiled for different instruction sets must
// not share one copy.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAXTAP_INLINE static __host__ __device__ __forceinline__
#else
#define JAXTAP_INLINE static inline __attribute__((always_inline))
#endif

namespace jaxtap {

JAXTAP_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

JAXTAP_INLINE float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

JAXTAP_INLINE uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

JAXTAP_INLINE float bf16_to_f32(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }

JAXTAP_INLINE uint16_t f32_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t quiet = bits | 0x400000u;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(choose(nan, quiet, rounded) >> 16);
}

namespace convert_detail {

// To a format of 1 sign bit, `kExponent` and `kMantissa` bits; `kLargest` is the largest finite
// number and `kOver` what overflow becomes.
template <int kExponent, int kMantissa, uint32_t kLargest, uint32_t kOver, uint32_t kNan,
          uint32_t kInf>
JAXTAP_INLINE uint32_t encode(float x) {
  constexpr int kShift = 23 - kMantissa;
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr uint32_t kLeastNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;
  // Added to a number that will be subnormal, it leaves the rounded number in the lowest bits.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 - kBias + 1 + kShift) << 23;
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 31) << (kExponent + kMantissa);
  const uint32_t odd = (magnitude >> kShift) & 1u;
  const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1u) + odd;
  const uint32_t normal = (rounded >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
  const float shifted = bits_float(magnitude) + bits_float(kMagic);
  const uint32_t subnormal = float_bits(shifted) - kMagic;
  uint32_t encoded = choose(magnitude < kLeastNormal, subnormal, normal);
  // Magnitudes beyond the format wrap nowhere: they only grow, up to that of inf.
  encoded = choose(magnitude >= kLeastNormal && normal > kLargest, kOver, encoded);
  encoded = choose(magnitude == 0x7f800000u, kInf, encoded);
  encoded = choose(magnitude > 0x7f800000u, kNan, encoded);
  return encoded | sign;
}

template <int kExponent, int kMantissa>
JAXTAP_INLINE float decode(uint32_t encoded, uint32_t inf_or_nan_from, bool has_inf) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr int kShift = 23 - kMantissa;
  const uint32_t magnitude = encoded & ((1u << (kExponent + kMantissa)) - 1u);
  const uint32_t sign = (encoded >> (kExponent + kMantissa)) << 31;
  const uint32_t normal = (magnitude << kShift) + (static_cast<uint32_t>(127 - kBias) << 23);
  constexpr uint32_t kUlp = static_cast<uint32_t>(127 - kBias + 1 - kMantissa) << 23;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * bits_float(kUlp);
  uint32_t bits = choose(magnitude < (1u << kMantissa), float_bits(small), normal);
  const uint32_t special = choose(has_inf && magnitude == inf_or_nan_from, 0x7f800000u,
                                  0x7fc00000u);
  bits = choose(magnitude >= inf_or_nan_from, special, bits);
  return bits_float(bits | sign);
}

}  // namespace convert_detail

// All processors of Arm in 64 bits convert float16, with the same results.
JAXTAP_INLINE float f16_to_f32(uint16_t x) {
#if defined(JAXTAP_NEON)
  __fp16 half;
  std::memcpy(&half, &x, 2);
  return half;
#else
  return convert_detail::decode<5, 10>(x, 0x7c00u, true);
#endif
}

JAXTAP_INLINE uint16_t f32_to_f16(float x) {
#if defined(JAXTAP_NEON)
  const auto half = static_cast<__fp16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
#else
  return static_cast<uint16_t>(
      convert_detail::encode<5, 10, 0x7bffu, 0x7c00u, 0x7e00u, 0x7c00u>(x));
#endif
}

JAXTAP_INLINE float f8e4m3fn_to_f32(uint8_t x) {
  return convert_detail::decode<4, 3>(x, 0x7fu, false);
}

JAXTAP_INLINE float f8e5m2_to_f32(uint8_t x) {
  return convert_detail::decode<5, 2>(x, 0x7cu, true);
}

// 2 ** (x - 127); 0xff is NaN. 0 is subnormal in float32.
JAXTAP_INLINE float e8m0_to_f32(uint8_t x) {
  const uint32_t encoded = x;
  uint32_t bits = choose(encoded == 0u, 0x400000u, encoded << 23);
  return bits_float(choose(encoded == 0xffu, 0x7fc00000u, bits));
}

}  // namespace jaxtap
