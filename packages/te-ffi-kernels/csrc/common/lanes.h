// Vectors of float32 as wide as the instruction set that a file of a folder isa/ is compiled for,
// and loads and stores of them in every format of arrays.
//
// All of it has internal linkage: files that are compiled for different instruction sets must not
// share one copy.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(JAXTAP_NEON)
#include <arm_neon.h>
#endif

#include "common/convert.h"

namespace jaxtap::lanes::JAXTAP_ISA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Whether this is plain C++, whose conversions of half precision are long. What no plan chooses on
// it is for comparing, and may be slow to be small.
#if defined(__AVX2__) || defined(JAXTAP_NEON)
constexpr bool kGeneric = false;
#else
constexpr bool kGeneric = true;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <class To, class From>
JAXTAP_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits have a size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Compilers convert between vectors of numbers of different sizes one by one.

JAXTAP_INLINE Ints widen(Bytes x) {
#if defined(__AVX512F__)
  return same_bits<Ints>(_mm512_cvtepu8_epi32(same_bits<__m128i>(x)));
#elif defined(__AVX2__)
  return same_bits<Ints>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(same_bits<int64_t>(x))));
#elif defined(JAXTAP_NEON)
  const uint16x8_t words = vmovl_u8(vcreate_u8(same_bits<uint32_t>(x)));
  return same_bits<Ints>(vmovl_u16(vget_low_u16(words)));
#else
  Ints wide{};
  for (int i = 0; i < kLanes; ++i) wide[i] = x[i];
  return wide;
#endif
}

JAXTAP_INLINE Words widen(Halves x) {
#if defined(__AVX512F__)
  return same_bits<Words>(_mm512_cvtepu16_epi32(same_bits<__m256i>(x)));
#elif defined(__AVX2__)
  return same_bits<Words>(_mm256_cvtepu16_epi32(same_bits<__m128i>(x)));
#else
  return __builtin_convertvector(x, Words);
#endif
}

// Of words below 2^16.
JAXTAP_INLINE Halves narrow(Words x) {
#if defined(__AVX512F__)
  return same_bits<Halves>(_mm512_cvtepi32_epi16(same_bits<__m512i>(x)));
#elif defined(__AVX2__)
  const __m256i bits = same_bits<__m256i>(x);
  const __m128i high = _mm256_extracti128_si256(bits, 1);
  return same_bits<Halves>(_mm_packus_epi32(_mm256_castsi256_si128(bits), high));
#else
  return __builtin_convertvector(x, Halves);
#endif
}

// Of numbers from -127 to 127.
JAXTAP_INLINE Bytes low_bytes(Ints x) {
#if defined(__AVX512F__)
  return same_bits<Bytes>(_mm512_cvtepi32_epi8(same_bits<__m512i>(x)));
#elif defined(__AVX2__)
  const __m256i bits = same_bits<__m256i>(x);
  const __m128i high = _mm256_extracti128_si256(bits, 1);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(bits), high);
  const auto bytes = static_cast<int64_t>(_mm_cvtsi128_si64(_mm_packs_epi16(words, words)));
  return same_bits<Bytes>(bytes);
#elif defined(JAXTAP_NEON)
  const uint16x4_t words = vmovn_u32(same_bits<uint32x4_t>(x));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  return same_bits<Bytes>(vget_lane_u32(vreinterpret_u32_u8(bytes), 0));
#else
  return __builtin_convertvector(x, Bytes);
#endif
}

// A bit where a comparison holds, else 0.
JAXTAP_INLINE Bytes mask_bytes(Ints holds, uint8_t bit) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_movepi32_mask(same_bits<__m512i>(holds));
  return same_bits<Bytes>(_mm_maskz_set1_epi8(mask, static_cast<char>(bit)));
#else
  return low_bytes(holds) & bit;
#endif
}

// x - 0 is x, which 0 + x isn't of -0.
JAXTAP_INLINE Floats all(float x) { return x - Floats{}; }

// 0, 1, 2 ...
JAXTAP_INLINE Ints iota() {
#if defined(__AVX512F__)
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
  return Ints{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return Ints{0, 1, 2, 3};
#endif
}

// The first `count` lanes of x, and `rest` in the others.
JAXTAP_INLINE Floats first_n(Floats x, int64_t count, float rest) {
  return iota() < static_cast<int32_t>(count) ? x : all(rest);
}

// The vectors of `count` numbers: calls body(i, Whole()) for those that are full, and body(i, Part)
// for the last if it isn't.
struct Whole {};
struct Part {
  int64_t count;
};

template <class Body>
JAXTAP_INLINE void over(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, Whole());
  if (i < count) body(i, Part{count - i});
}

// Of numbers in memory, at any address. Of a part, `count` of them alone are touched, and the other
// lanes are zeros.
template <class Vector, class T>
JAXTAP_INLINE Vector read(const T* from, Whole = {}) {
  Vector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <class Vector, class T>
JAXTAP_INLINE void write(T* to, Vector x, Whole = {}) {
  std::memcpy(to, &x, sizeof(x));
}

template <class Vector, class T>
JAXTAP_INLINE Vector read(const T* from, Part part) {
  const int64_t count = part.count;
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << count) - 1u);
  if constexpr (sizeof(T) == 4) {
    return same_bits<Vector>(_mm512_maskz_loadu_epi32(mask, from));
  } else if constexpr (sizeof(T) == 2) {
    return same_bits<Vector>(_mm256_maskz_loadu_epi16(mask, from));
  } else {
    return same_bits<Vector>(_mm_maskz_loadu_epi8(mask, from));
  }
#elif defined(JAXTAP_NEON)  // by copies of known sizes, which need no call
  if (count == kLanes) return read<Vector>(from);
  T x[kLanes] = {};
  if ((count & 2) != 0) std::memcpy(x, from, 2 * sizeof(T));
  if ((count & 1) != 0) std::memcpy(x + (count & 2), from + (count & 2), sizeof(T));
  return read<Vector>(x);
#else
  Vector x = {};
  std::memcpy(&x, from, static_cast<size_t>(count) * sizeof(T));
  return x;
#endif
}

template <class Vector, class T>
JAXTAP_INLINE void write(T* to, Vector x, Part part) {
  const int64_t count = part.count;
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << count) - 1u);
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(to, mask, same_bits<__m512i>(x));
  } else if constexpr (sizeof(T) == 2) {
    _mm256_mask_storeu_epi16(to, mask, same_bits<__m256i>(x));
  } else {
    _mm_mask_storeu_epi8(to, mask, same_bits<__m128i>(x));
  }
#elif defined(JAXTAP_NEON)
  if (count == kLanes) return write(to, x);
  T lanes[kLanes];
  write(lanes, x);
  if ((count & 2) != 0) std::memcpy(to, lanes, 2 * sizeof(T));
  if ((count & 1) != 0) std::memcpy(to + (count & 2), lanes + (count & 2), sizeof(T));
#else
  std::memcpy(to, &x, static_cast<size_t>(count) * sizeof(T));
#endif
}

// Formats of arrays.

struct F32 {
  using Type = float;
  using Vector = Floats;
  JAXTAP_INLINE Floats widen(Floats x) { return x; }
  JAXTAP_INLINE Floats narrow(Floats x) { return x; }
};

struct BF16 {
  using Type = uint16_t;
  using Vector = Halves;
  JAXTAP_INLINE Floats widen(Halves x) {
    return same_bits<Floats>(lanes::JAXTAP_ISA_NAMESPACE::widen(x) << 16);
  }
  JAXTAP_INLINE Halves narrow(Floats x) {
    const Words bits = same_bits<Words>(x);
    const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Words encoded = x == x ? rounded : bits | 0x400000u;
    return lanes::JAXTAP_ISA_NAMESPACE::narrow(encoded >> 16);
  }
};

struct F16 {
  using Type = uint16_t;
  using Vector = Halves;
  JAXTAP_INLINE Floats widen(Halves x) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(same_bits<__m256i>(x));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(same_bits<__m128i>(x));
#elif defined(JAXTAP_NEON)
    return same_bits<Floats>(vcvt_f32_f16(same_bits<float16x4_t>(x)));
#else
    Floats wide{};
    for (int i = 0; i < kLanes; ++i) wide[i] = f16_to_f32(x[i]);
    return wide;
#endif
  }
  JAXTAP_INLINE Halves narrow(Floats x) {
#if defined(__AVX512F__)
    return same_bits<Halves>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    return same_bits<Halves>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(JAXTAP_NEON)
    return same_bits<Halves>(vcvt_f16_f32(same_bits<float32x4_t>(x)));
#else
    Halves half{};
    for (int i = 0; i < kLanes; ++i) half[i] = f32_to_f16(x[i]);
    return half;
#endif
  }
};

template <class Format, class Where = Whole>
JAXTAP_INLINE Floats load(const typename Format::Type* from, Where where = {}) {
  return Format::widen(read<typename Format::Vector>(from, where));
}

template <class Format, class Where = Whole>
JAXTAP_INLINE void store(typename Format::Type* to, Floats x, Where where = {}) {
  write(to, Format::narrow(x), where);
}

// What a format makes of numbers.
template <class Format>
JAXTAP_INLINE Floats rounded(Floats x) {
  return Format::widen(Format::narrow(x));
}

JAXTAP_INLINE Floats first_n(Floats x, Whole, float) { return x; }
JAXTAP_INLINE Floats first_n(Floats x, Part part, float rest) {
  return first_n(x, part.count, rest);
}

}  // namespace
}  // namespace jaxtap::lanes::JAXTAP_ISA_NAMESPACE
