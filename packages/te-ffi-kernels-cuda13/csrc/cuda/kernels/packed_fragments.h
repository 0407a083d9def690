// What a warp multiplies at once, from panels and from rows of x.
//
// A step is 32 rows of a weight and 32 columns: one panel of 4 bits, two of 8 bits. As panels are
// stored, a warp reads 512 bytes of a step in 4 bits and 1024 in 8 bits, each lane 16 at a time,
// and these are its fragments: lane 4 * g + t has columns 4 * g up to 4 * g + 3, of every fourth
// line.
#pragma once

#include "cuda/kernels/panels.h"
#include "cuda/kernels/tensor_core.h"

namespace jaxtap::cuda {
namespace {

constexpr int kStep = 32;

// The words of a step, and where those of the next one are.
template <int kBits>
struct Stream32 {
  static constexpr int kLoads = kBits == 8 ? 2 : 1;
  static constexpr int kLines = kStep / kDepthOf<kBits>;
  using Words = Vector<uint32_t, 4>[kLoads];

  const uint8_t* at;
  int64_t skip, left, group_steps;  // bytes of scales between groups; steps up to there

  __device__ __forceinline__ void next(Words& words) {
    JAXTAP_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      words[i] = read<4>(reinterpret_cast<const uint32_t*>(at + 4 * i * kLineOf<kBits>));
    }
    at += kLines * kLineOf<kBits>;
    if (kBits == 8 || --left != 0) return;
    at += skip;
    left = group_steps;
  }
};

// Four words of weights to the fragments of half a step: those of two columns for each of the two
// matmuls.
template <class X, int kBits>
JAXTAP_DEVICE void fragments(const typename Stream32<kBits>::Words& words, int half,
                             uint32_t (&a)[2][4]) {
  uint32_t pairs[4][2];
  JAXTAP_UNROLL
  for (int c = 0; c < 4; ++c) {
    if constexpr (kBits == 8) {
      pairs_of<8>(X(), words[half].at[c], pairs[c]);
    } else {
      pairs_of<4>(X(), words[0].at[c] >> (4 * half), pairs[c]);
    }
  }
  JAXTAP_UNROLL
  for (int j = 0; j < 2; ++j) {
    JAXTAP_UNROLL
    for (int i = 0; i < 4; ++i) a[j][i] = pairs[2 * j + i % 2][i / 2];
  }
}
template <int kBits>
JAXTAP_DEVICE void int8_fragments(const typename Stream32<kBits>::Words& words,
                                  uint32_t (&a)[2][4]) {
  JAXTAP_UNROLL
  for (int j = 0; j < 2; ++j) {
    JAXTAP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int c = 2 * j + i % 2;
      if constexpr (kBits == 8) {
        a[j][i] = int8_of<8>(words[i / 2].at[c]);
      } else {
        a[j][i] = int8_of<4>(words[0].at[c] >> (4 * (i / 2)));
      }
    }
  }
}

// The rows of the weight that a lane has of a step: 8 that follow each other in 4 bits, in 8 bits
// twice 4.
template <int kBits>
JAXTAP_DEVICE int64_t row_of(int64_t step, int t, int half) {
  return kStep * step + (kBits == 8 ? 16 * half + 4 * t : 8 * t + 4 * half);
}

// The numbers of a row of x for those.
template <class X, int kBits>
JAXTAP_DEVICE void numbers_of(const typename X::Type* row, bool there, int64_t step, int t,
                              int64_t k, bool wide, typename X::Type (&out)[2][4]) {
  JAXTAP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t at = row_of<kBits>(step, t, half);
    if (wide && there && at < k) {
      const auto four = read<4>(row + at);
      JAXTAP_UNROLL
      for (int i = 0; i < 4; ++i) out[half][i] = four.at[i];
    } else {
      JAXTAP_UNROLL
      for (int i = 0; i < 4; ++i) {
        out[half][i] = there && at + i < k ? row[at + i] : typename X::Type(0);
      }
    }
  }
}

// Fragments of four numbers of x, in the order of the weight's. float32 is a sum of three numbers
// of bfloat16: 24 bits are three times 8.
template <int kBits>
JAXTAP_DEVICE void x_fragments(const uint16_t (&x)[4], uint32_t (&b)[1][2]) {
  constexpr int kNext = kBits == 8 ? 1 : 2, kSecond = kBits == 8 ? 2 : 1;
  b[0][0] = x[0] | static_cast<uint32_t>(x[kNext]) << 16;
  b[0][1] = x[kSecond] | static_cast<uint32_t>(x[kSecond + kNext]) << 16;
}
template <int kBits>
JAXTAP_DEVICE void x_fragments(const float (&x)[4], uint32_t (&b)[3][2]) {
  float rest[4];
  JAXTAP_UNROLL
  for (int i = 0; i < 4; ++i) rest[i] = x[i];
  JAXTAP_UNROLL
  for (int part = 0; part < 3; ++part) {
    uint16_t high[4];
    JAXTAP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = float_bits(rest[i]) & 0xffff0000u;
      high[i] = static_cast<uint16_t>(bits >> 16);
      rest[i] -= bits_float(bits);
    }
    uint32_t one[1][2];
    x_fragments<kBits>(high, one);
    b[part][0] = one[0][0];
    b[part][1] = one[0][1];
  }
}

}  // namespace
}  // namespace jaxtap::cuda
