// Kernels in plain C++, for any machine. Compile with: -O3 -ffp-contract=off
#include "matmul/kernels.h"

#include "common/convert.h"
#include "matmul/scales.h"

namespace jaxtap {
namespace {

#include "matmul/rows.inl"
#include "matmul/epilogue.inl"
#include "matmul/rotate.inl"

constexpr int kTileRows = 1, kTilePanels = 1, kScaledPanels = 1;
constexpr int kFewRows = 1;
constexpr bool kSignedSums = false;
template <int kDigits>
constexpr bool kTotalsStay = false;

// Unsigned, so that passing the ends of int32 on the way is defined and the sums are right in the
// end.
struct Sums {
  uint32_t at[16];
};

struct Floats {
  float at[16];

  friend Floats operator+(const Floats& a, const Floats& b) {
    Floats sum;
    for (int c = 0; c < 16; ++c) sum.at[c] = a.at[c] + b.at[c];
    return sum;
  }
  friend Floats operator*(const Floats& a, const Floats& b) {
    Floats product;
    for (int c = 0; c < 16; ++c) product.at[c] = a.at[c] * b.at[c];
    return product;
  }
  friend Floats operator*(const Floats& a, float b) {
    Floats product;
    for (int c = 0; c < 16; ++c) product.at[c] = a.at[c] * b;
    return product;
  }
};

JAXTAP_INLINE Sums sums_of(int32_t x) {
  Sums sums;
  for (uint32_t& sum : sums.at) sum = static_cast<uint32_t>(x);
  return sums;
}

JAXTAP_INLINE Sums load_sums(const int32_t* from) {
  Sums sums;
  __builtin_memcpy(&sums, from, 64);
  return sums;
}

JAXTAP_INLINE void store_sums(int32_t* to, const Sums& x) { __builtin_memcpy(to, &x, 64); }

JAXTAP_INLINE Floats load_floats(const void* from) {
  Floats x;
  __builtin_memcpy(&x, from, 64);
  return x;
}

JAXTAP_INLINE void store_floats(void* to, const Floats& x) { __builtin_memcpy(to, &x, 64); }

JAXTAP_INLINE Floats to_floats(const Sums& x) {
  Floats floats;
  for (int c = 0; c < 16; ++c) floats.at[c] = static_cast<float>(static_cast<int32_t>(x.at[c]));
  return floats;
}

template <bool kFitsInt32>
JAXTAP_INLINE Floats two_digits(const Sums& low, const Sums& high) {
  if (!kFitsInt32) return to_floats(high) * 256.0f + to_floats(low);
  Sums both;
  for (int c = 0; c < 16; ++c) both.at[c] = (high.at[c] << 8) + low.at[c];
  return to_floats(both);
}

#include "matmul/plain_rows.inl"

template <bool kInt16, int R, int P>
JAXTAP_INLINE void add_products(const Rows<R>& rows, const uint8_t* qvalues, int64_t, int64_t k,
                                Sums (&acc)[R][P]) {
  static_assert(P == 1 && !kInt16, "nothing else is asked for here");
  for (int64_t i = 0; i < k; i += 4, qvalues += 64) {
    for (int r = 0; r < R; ++r) {
      const int8_t* x = rows.x + r * rows.stride + i;
      const int32_t x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
      for (int c = 0; c < 16; ++c) {
        const int32_t sum = x0 * qvalues[4 * c] + x1 * qvalues[4 * c + 1] +
                            x2 * qvalues[4 * c + 2] + x3 * qvalues[4 * c + 3];
        acc[r][0].at[c] += static_cast<uint32_t>(sum);
      }
    }
  }
}

#include "matmul/tile.inl"

template <bool kTable, int kRows>
JAXTAP_INLINE void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, const int32_t* offsets,
                               int64_t offsets_stride, int32_t (*sums)[32]) {
  const uint8_t* bytes = table.bytes[part];
  for (int r = 0; r < kRows; ++r, x += x_stride) {
    uint32_t acc[32];
    for (int c = 0; c < 32; ++c) acc[c] = 0u - static_cast<uint32_t>(offsets[r * offsets_stride]);
    const uint8_t* line = qvalues;
    for (int64_t i = 0; i < k; i += 8, line += 128) {
      for (int j = 0; j < 4; ++j) {
        const int32_t low = x[i + j], high = x[i + 4 + j];
        for (int c = 0; c < 32; ++c) {
          const int32_t byte = line[4 * c + j];
          const int32_t first = kTable ? bytes[byte & 15] : byte & 15;
          const int32_t second = kTable ? bytes[byte >> 4] : byte >> 4;
          acc[c] += static_cast<uint32_t>(low * first + high * second);
        }
      }
    }
    __builtin_memcpy(sums[r], acc, sizeof(acc));
  }
}

#include "matmul/stream.inl"
#include "matmul/table.inl"

}  // namespace

const Kernels& generic_kernels() {
  static constexpr Kernels kKernels = own_kernels(1, 4096, stream, kSignedSums);
  return kKernels;
}

}  // namespace jaxtap
