// The inner kernel of products in float32. A sum of products is rounded as the machine's
// multiply-add does it: the references don't promise these bits.

#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

#include "te/isa/table.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kRows = 12;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRows = 6;
#else
constexpr int kWidth = 4;
constexpr int kRows = 6;
#endif
constexpr int kVectors = 2;
constexpr int kCols = kWidth * kVectors;

typedef float Vector __attribute__((vector_size(kWidth * 4)));

inline __attribute__((always_inline)) Vector read(const float* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

void matmul(int64_t k, const float* __restrict a, const float* __restrict b,
             float* __restrict c, int64_t stride, bool first) {
  Vector sums[kRows][kVectors] = {};
  for (int64_t i = 0; i < k; ++i) {
    Vector row[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) row[v] = read(b + i * kCols + v * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const float factor = a[i * kRows + r];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * row[v];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* at = c + r * stride + v * kWidth;
      Vector sum = sums[r][v];
      if (!first) sum += read(at);
      __builtin_memcpy(at, &sum, sizeof sum);
    }
  }
}

}  // namespace

void set_matmul(Table& table) {
  table.matmul = matmul;
  table.tile_rows = kRows;
  table.tile_cols = kCols;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
