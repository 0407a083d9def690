// The tile instructions of AMX that the kernels need, or with JAXTAP_EMULATE_AMX the same in plain
// C++, for tests on machines without them.
//
// The real ones are written in assembler: it takes the tile's number from a template argument,
// which compilers' macros do not, tells the compiler that memory is read, and needs no flags.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxtap {
namespace {

// The operand of ldtilecfg: palette 1 has 8 tiles of up to 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t row_count, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(row_count);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "ldtilecfg reads 64 bytes");

#if !defined(JAXTAP_EMULATE_AMX)

inline void tile_configure(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

inline void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Rows are `stride` bytes apart.
template <int kTile>
inline void tile_load(const void* base, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(void* base, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(kTile)
                   : "memory");
}

// kC += kA (int8) times kB (uint8, 4 rows interleaved), in int32.
template <int kC, int kA, int kB>
inline void tile_multiply() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// The same of int8 in kB.
template <int kC, int kA, int kB>
inline void tile_multiply_signed() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// kC (float32) += kA times kB (bfloat16, 2 rows interleaved): the products of even and those of odd
// places are summed apart, in float32, and their sum is added. Subnormal numbers are zeros
// everywhere, and all sums are rounded half to even, whatever the processor's modes.
template <int kC, int kA, int kB>
inline void tile_multiply_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

#else

// Faults of the hardware are aborts here.
struct EmulatedTiles {
  TileConfig config;
  bool configured = false;
  uint8_t data[8][16][64];

  int rows(int tile) const {
    require(configured && config.rows[tile] > 0 && config.row_bytes[tile] > 0);
    return config.rows[tile];
  }
  int row_bytes(int tile) const { return config.row_bytes[tile]; }
  static void require(bool holds) {
    if (!holds) __builtin_trap();
  }
};

inline EmulatedTiles& emulated() {
  thread_local EmulatedTiles tiles;
  return tiles;
}

inline void tile_configure(const TileConfig& config) {
  EmulatedTiles& e = emulated();
  EmulatedTiles::require(config.palette == 1);
  for (int i = 0; i < 16; ++i) {
    const bool used = config.rows[i] != 0;
    EmulatedTiles::require(used == (config.row_bytes[i] != 0) && (!used || i < 8));
    EmulatedTiles::require(config.rows[i] <= 16 && config.row_bytes[i] <= 64);
  }
  e.config = config;
  e.configured = true;
  std::memset(e.data, 0, sizeof(e.data));
}

inline void tile_release() { emulated().configured = false; }

template <int kTile>
inline void tile_zero() {
  emulated().rows(kTile);
  std::memset(emulated().data[kTile], 0, sizeof(emulated().data[kTile]));
}

template <int kTile>
inline void tile_load(const void* base, int64_t stride) {
  EmulatedTiles& e = emulated();
  std::memset(e.data[kTile], 0, sizeof(e.data[kTile]));
  for (int r = 0; r < e.rows(kTile); ++r) {
    std::memcpy(e.data[kTile][r], static_cast<const uint8_t*>(base) + r * stride,
                static_cast<size_t>(e.row_bytes(kTile)));
  }
}

template <int kTile>
inline void tile_store(void* base, int64_t stride) {
  const EmulatedTiles& e = emulated();
  for (int r = 0; r < e.rows(kTile); ++r) {
    std::memcpy(static_cast<uint8_t*>(base) + r * stride, e.data[kTile][r],
                static_cast<size_t>(e.row_bytes(kTile)));
  }
}

template <int kC, int kA, int kB, typename Right>
inline void emulate_multiply() {
  EmulatedTiles& e = emulated();
  EmulatedTiles::require(e.rows(kA) == e.rows(kC) && e.row_bytes(kB) == e.row_bytes(kC) &&
                         e.row_bytes(kA) == 4 * e.rows(kB));
  for (int m = 0; m < e.rows(kC); ++m) {
    for (int n = 0; n < e.row_bytes(kC) / 4; ++n) {
      uint32_t sum;
      std::memcpy(&sum, &e.data[kC][m][4 * n], 4);
      for (int k = 0; k < e.row_bytes(kA); ++k) {
        const int a = static_cast<int8_t>(e.data[kA][m][k]);
        const int b = static_cast<Right>(e.data[kB][k / 4][4 * n + k % 4]);
        sum += static_cast<uint32_t>(a * b);
      }
      std::memcpy(&e.data[kC][m][4 * n], &sum, 4);
    }
  }
}

template <int kC, int kA, int kB>
inline void tile_multiply() {
  emulate_multiply<kC, kA, kB, uint8_t>();
}

template <int kC, int kA, int kB>
inline void tile_multiply_signed() {
  emulate_multiply<kC, kA, kB, int8_t>();
}

// A sum of two float32, or of one and a product of two bfloat16, is rounded by this alone: where it
// has more bits than double, the smaller one is too far below to matter.
inline float rounded_sum(double x) {
  constexpr double kLeast = 0x1p-126 - 0x1p-151;  // what 24 bits round to a normal number
  return __builtin_fabs(x) < kLeast ? static_cast<float>(__builtin_copysign(0.0, x))
                                    : static_cast<float>(x);
}

// Without its subnormals.
inline float float_of(uint32_t bits) {
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

template <int kC, int kA, int kB>
inline void tile_multiply_bf16() {
  EmulatedTiles& e = emulated();
  EmulatedTiles::require(e.rows(kA) == e.rows(kC) && e.row_bytes(kB) == e.row_bytes(kC) &&
                         e.row_bytes(kA) == 4 * e.rows(kB));
  const int pairs = e.rows(kB), columns = e.row_bytes(kC) / 4;
  double right[2][16][16];
  for (int k = 0; k < pairs; ++k) {
    for (int n = 0; n < columns; ++n) {
      uint32_t pair;
      std::memcpy(&pair, &e.data[kB][k][4 * n], 4);
      right[0][k][n] = static_cast<double>(float_of(pair << 16));
      right[1][k][n] = static_cast<double>(float_of(pair & 0xffff0000u));
    }
  }
  for (int m = 0; m < e.rows(kC); ++m) {
    float sums[2][16] = {};
    for (int k = 0; k < pairs; ++k) {
      uint32_t pair;
      std::memcpy(&pair, &e.data[kA][m][4 * k], 4);
      for (int odd = 0; odd < 2; ++odd) {
        const auto left = static_cast<double>(float_of(odd ? pair & 0xffff0000u : pair << 16));
        for (int n = 0; n < columns; ++n) {
          sums[odd][n] = rounded_sum(static_cast<double>(sums[odd][n]) + left * right[odd][k][n]);
        }
      }
    }
    for (int n = 0; n < columns; ++n) {
      uint32_t bits;
      std::memcpy(&bits, &e.data[kC][m][4 * n], 4);
      const auto both = static_cast<double>(
          rounded_sum(static_cast<double>(sums[0][n]) + static_cast<double>(sums[1][n])));
      const float sum = rounded_sum(static_cast<double>(float_of(bits)) + both);
      std::memcpy(&e.data[kC][m][4 * n], &sum, 4);
    }
  }
}

#endif

}  // namespace
}  // namespace jaxtap
