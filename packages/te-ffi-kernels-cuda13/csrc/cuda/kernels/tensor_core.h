// Matmuls on tensor cores: what a warp multiplies at once, and quantized values as they take them.
//
// mma.sync of the PTX ISA (section "Matrix multiply-accumulate operation using mma instruction"),
// which every GPU since compute capability 8.0 has: a[16, depth] times b[depth, 8], where depth is
// 16 numbers of 16 bits or 32 of 8. Lane 4 * g + t of a warp holds, with `per` numbers in a word,
//
//   a[0], a[1]  rows g and g + 8, columns per * t up to per * t + per - 1
//   a[2], a[3]  the same rows, columns 4 * per further on
//   b[0], b[1]  column g, rows as the columns of a[0] and a[2]
//   d[0], d[1]  row g, columns 2 * t and 2 * t + 1
//   d[2], d[3]  row g + 8, the same columns
//
// Which rows of a weight these are is free, as long as both factors agree.
#pragma once

#include "cuda/formats.h"

namespace jaxtap::cuda {
namespace {

struct Int8Values {
  using Type = int8_t;
};

#if defined(__CUDACC__)

#define JAXTAP_MMA(NAME, CONSTRAINT)                                                        \
  asm volatile("mma.sync.aligned." NAME                                                     \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
               : CONSTRAINT(d[0]), CONSTRAINT(d[1]), CONSTRAINT(d[2]), CONSTRAINT(d[3])     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

JAXTAP_DEVICE void mma(BF16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  JAXTAP_MMA("m16n8k16.row.col.f32.bf16.bf16.f32", "+f");
}
JAXTAP_DEVICE void mma(F16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  JAXTAP_MMA("m16n8k16.row.col.f32.f16.f16.f32", "+f");
}
JAXTAP_DEVICE void mma(Int8Values, int32_t (&d)[4], const uint32_t (&a)[4],
                       const uint32_t (&b)[2]) {
  JAXTAP_MMA("m16n8k32.row.col.s32.s8.s8.s32", "+r");
}

JAXTAP_DEVICE uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t which) {
  return __byte_perm(low, high, which);
}
JAXTAP_DEVICE uint32_t minus(BF16, uint32_t pair, uint32_t negated) {
  constexpr uint32_t kOnes = 0x3f803f80u;
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(kOnes), "r"(negated));
  return out;
}
JAXTAP_DEVICE uint32_t minus(F16, uint32_t pair, uint32_t negated) {
  uint32_t out;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(negated));
  return out;
}

#else

template <class X>
float number_of(X, uint32_t word, int i) {
  return X::load(static_cast<uint16_t>(word >> (16 * i)));
}
inline int32_t number_of(Int8Values, uint32_t word, int i) {
  return static_cast<int8_t>(word >> (8 * i) & 0xffu);
}

template <class X, class Sum>
void mma(X x, Sum (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr int kPer = 4 / sizeof(typename X::Type), kFar = 4 * kPer;
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  emulator::warp_exchange(words, 6);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), col = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 2 * kFar; ++k) {
      const int t = k % kFar / kPer, far = k / kFar;
      const uint32_t of_a = emulator::warp_exchanged(row % 8 * 4 + t)[row / 8 + 2 * far];
      const uint32_t of_b = emulator::warp_exchanged(col * 4 + t)[4 + far];
      d[i] += number_of(x, of_a, k % kPer) * number_of(x, of_b, k % kPer);
    }
  }
}

inline uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t which) {
  const uint64_t all = low | static_cast<uint64_t>(high) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(all >> (8 * (which >> (4 * i) & 7)) & 0xffu) << (8 * i);
  }
  return out;
}
template <class X>
uint32_t minus(X, uint32_t pair, uint32_t negated) {
  uint32_t out = 0;
  for (int i = 0; i < 2; ++i) {
    const float sum = number_of(X(), pair, i) + number_of(X(), negated, i);
    out |= static_cast<uint32_t>(X::store(sum)) << (16 * i);
  }
  return out;
}

#endif

// Two words of two numbers, of quantized values that are stored in a word with an offset: those of
// the four bytes in their order, or of the low half of each byte as 0, 2, 1, 3. They are the last
// places of a power of two, from which it is subtracted: exact, and without a conversion.
template <int kBits>
JAXTAP_DEVICE void pairs_of(F16 x, uint32_t word, uint32_t (&out)[2]) {
  if constexpr (kBits == 8) {  // 1024 + value + 128
    out[0] = minus(x, bytes_of(word, 0x64646464u, 0x4140), 0xe480e480u);
    out[1] = minus(x, bytes_of(word, 0x64646464u, 0x4342), 0xe480e480u);
  } else {  // 1024 + value + 8
    out[0] = minus(x, (word & 0x000f000fu) | 0x64006400u, 0xe408e408u);
    out[1] = minus(x, (word >> 8 & 0x000f000fu) | 0x64006400u, 0xe408e408u);
  }
}
template <int kBits>
JAXTAP_DEVICE void pairs_of(BF16 x, uint32_t word, uint32_t (&out)[2]) {
  if constexpr (kBits == 8) {  // too wide for bfloat16: 2**23 + value + 128, in float32
    uint32_t wide[4];
    JAXTAP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = bytes_of(word, 0x4b000000u, 0x7540u + static_cast<uint32_t>(i));
      wide[i] = float_bits(bits_float(bits) - 8388736.0f);
    }
    out[0] = bytes_of(wide[0], wide[1], 0x7632);
    out[1] = bytes_of(wide[2], wide[3], 0x7632);
  } else {  // 128 + value + 8
    out[0] = minus(x, (word & 0x000f000fu) | 0x43004300u, 0xc308c308u);
    out[1] = minus(x, (word >> 8 & 0x000f000fu) | 0x43004300u, 0xc308c308u);
  }
}

// Four bytes of int8: those of a word, or of the low half of each byte.
template <int kBits>
JAXTAP_DEVICE uint32_t int8_of(uint32_t word) {
  if constexpr (kBits == 8) return word ^ 0x80808080u;
  return ((word & 0x0f0f0f0fu) + 0x78787878u) ^ 0x80808080u;
}

}  // namespace
}  // namespace jaxtap::cuda
