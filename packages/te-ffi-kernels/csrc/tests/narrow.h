// float32 to float8, as tests want numbers of these formats. Kernels have te/isa/formats.h, whose
// numbers are held against these.
// Names without an ending treat numbers beyond the format as a cast of JAX does (inf, or NaN in
// formats without inf); those that end in _saturated give the largest finite number instead, for
// infinities too.
#pragma once

#include "common/convert.h"

namespace jaxtap::testing {

inline uint8_t f32_to_f8e4m3fn(float x) {
  return static_cast<uint8_t>(convert_detail::encode<4, 3, 0x7eu, 0x7fu, 0x7fu, 0x7fu>(x));
}

inline uint8_t f32_to_f8e4m3fn_saturated(float x) {
  return static_cast<uint8_t>(convert_detail::encode<4, 3, 0x7eu, 0x7eu, 0x7fu, 0x7eu>(x));
}

inline uint8_t f32_to_f8e5m2(float x) {
  return static_cast<uint8_t>(convert_detail::encode<5, 2, 0x7bu, 0x7cu, 0x7eu, 0x7cu>(x));
}

inline uint8_t f32_to_f8e5m2_saturated(float x) {
  return static_cast<uint8_t>(convert_detail::encode<5, 2, 0x7bu, 0x7bu, 0x7eu, 0x7bu>(x));
}

// The nearest power of two, the greater of two equally near; NaN for zero, negative numbers and
// what is beyond 2 ** 127.
inline uint8_t f32_to_e8m0(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t normal = (bits + 0x400000u) >> 23;
  const uint32_t subnormal = static_cast<uint32_t>(bits >= 0x600000u);
  uint32_t encoded = choose(bits < 0x800000u, subnormal, normal);
  encoded = choose(encoded > 0xfeu, 0xffu, encoded);  // overflow, NaN, inf, and the sign bit
  return static_cast<uint8_t>(choose(bits == 0u, 0xffu, encoded));
}

}  // namespace jaxtap::testing
