// Vectors of numbers, and arrays of them. Of one instruction set: everything has internal linkage.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

#include "common/dtype.h"
#include "common/lanes_math.h"
#include "common/register_tile.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

using lanes::JAXTAP_ISA_NAMESPACE::all;
using lanes::JAXTAP_ISA_NAMESPACE::load;
using lanes::JAXTAP_ISA_NAMESPACE::max;
using lanes::JAXTAP_ISA_NAMESPACE::over;
using lanes::JAXTAP_ISA_NAMESPACE::store;
using tile::Ints;
using tile::kWidth;
using tile::read;
using tile::Vector;
using tile::write;

#if defined(JAXTAP_COLUMNS)
constexpr int kCols = JAXTAP_COLUMNS;  // of a panel
#else
using tile::kCols;
#endif
constexpr float kInfinity = __builtin_huge_valf();
constexpr double kLog2E = 1.44269504088896341;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

JAXTAP_TILE Ints all(int32_t x) { return Ints{} + x; }

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to whole numbers
constexpr float kLeastExponent = -126.0f;

// 2^(whole + rest) for whole numbers from -126 to 127, which are given with kRound added, and rests
// from -1/2 to 1/2: to about 1 unit in the last place (the coefficients of Cephes' exp2f).
JAXTAP_TILE Vector exp2_of(Vector shifted, Vector rest) {
  Vector p = all(1.535336188319500e-4f);
  p = p * rest + all(1.339887440266574e-3f);
  p = p * rest + all(9.618437357674640e-3f);
  p = p * rest + all(5.550332471162809e-2f);
  p = p * rest + all(2.402264791363012e-1f);
  p = p * rest + all(6.931472028550421e-1f);
  p = p * rest + all(1.0f);
  return (Vector)((Ints)p + ((Ints)shifted << 23));
}

// A number as the sum of two.
struct Two {
  float high, low;
};

JAXTAP_TILE Two two_of(double x) {
  const auto high = static_cast<float>(x);
  return {high, static_cast<float>(x - static_cast<double>(high))};
}

// 2^(x * factor) for negative numbers and 0; 0 below 2^-126. NaN stays NaN. Numbers far from 0
// would lose what the rounding of a product with one float32 takes away.
JAXTAP_TILE Vector exp2_of(Vector x, Two factor) {
  const Vector shifted = x * factor.high + all(kRound);
  const Vector whole = shifted - all(kRound);
  const Vector rest = x * factor.low + (x * factor.high - whole);
  return x * factor.high < all(kLeastExponent) ? Vector{} : exp2_of(shifted, rest);
}

// out[c][r] = in[r][c] of kWidth rows and columns.
inline void transpose_tile(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(in + i * in_stride);
#pragma GCC unroll 2
  for (int twice = 0; twice < 2; ++twice) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm512_permutex2var_ps(a[i], low, a[i + 8]);
      b[2 * i + 1] = _mm512_permutex2var_ps(a[i], high, a[i + 8]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = _mm512_permutex2var_ps(b[i], low, b[i + 8]);
      a[2 * i + 1] = _mm512_permutex2var_ps(b[i], high, b[i + 8]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(out + i * out_stride, a[i]);
#elif defined(__AVX2__)
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(in + i * in_stride);
#pragma GCC unroll 3
  for (int stage = 0; stage < 3; ++stage) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 low = _mm256_unpacklo_ps(a[i], a[i + 4]);
      const __m256 high = _mm256_unpackhi_ps(a[i], a[i + 4]);
      b[2 * i] = _mm256_permute2f128_ps(low, high, 0x20);
      b[2 * i + 1] = _mm256_permute2f128_ps(low, high, 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = b[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + i * out_stride, a[i]);
#elif defined(JAXTAP_NEON)
  float64x2_t pairs[2][2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const float32x4_t first = vld1q_f32(in + 2 * i * in_stride);
    const float32x4_t second = vld1q_f32(in + (2 * i + 1) * in_stride);
    pairs[i][0] = vreinterpretq_f64_f32(vtrn1q_f32(first, second));
    pairs[i][1] = vreinterpretq_f64_f32(vtrn2q_f32(first, second));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const float64x2_t upper = vtrn1q_f64(pairs[0][i], pairs[1][i]);
    const float64x2_t lower = vtrn2q_f64(pairs[0][i], pairs[1][i]);
    vst1q_f32(out + i * out_stride, vreinterpretq_f32_f64(upper));
    vst1q_f32(out + (i + 2) * out_stride, vreinterpretq_f32_f64(lower));
  }
#else
  for (int r = 0; r < kWidth; ++r) {
    for (int c = 0; c < kWidth; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
#endif
}

// The same of multiples of kWidth.
inline void transpose(const float* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                      int64_t out_stride) {
  for (int64_t r = 0; r < rows; r += kWidth) {
    for (int64_t c = 0; c < cols; c += kWidth) {
      transpose_tile(in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
    }
  }
}

inline int64_t padded(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

// An element of an array of float32, bfloat16 or float16.
inline const char* at(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * (dtype == DType::F32 ? 4 : 2);
}

inline char* at(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * (dtype == DType::F32 ? 4 : 2);
}

// Calls run(format) for the format of a dtype.
template <class Run>
JAXTAP_TILE void by_format(DType dtype, const Run& run) {
  if (dtype == DType::F32) return run(lanes::JAXTAP_ISA_NAMESPACE::F32());
  if (dtype == DType::BF16) return run(lanes::JAXTAP_ISA_NAMESPACE::BF16());
  run(lanes::JAXTAP_ISA_NAMESPACE::F16());
}

// Reads `count` numbers as float32, and zeros after them up to `width`, a multiple of kWidth.
//
// Neither this nor store_numbers is inlined: they are called for a row each, from many places, and
// each copy takes a compiler as long as all the rest of a file.
__attribute__((noinline, unused)) void load_numbers(DType dtype, const void* from, int64_t count,
                                                    float* to, int64_t width) {
  by_format(dtype, [&](auto format) {
    using Format = decltype(format);
    const auto* in = static_cast<const typename Format::Type*>(from);
    over(count, [&](int64_t i, auto part) { write(to + i, load<Format>(in + i, part)); });
  });
  for (int64_t i = padded(count); i < width; i += kWidth) write(to + i, Vector{});
}

// Writes float32, which go on to whole vectors, as `dtype`, rounding half to even.
__attribute__((noinline, unused)) void store_numbers(DType dtype, const float* from, int64_t count,
                                                     void* to) {
  by_format(dtype, [&](auto format) {
    using Format = decltype(format);
    auto* out = static_cast<typename Format::Type*>(to);
    over(count, [&](int64_t i, auto part) { store<Format>(out + i, read(from + i), part); });
  });
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
