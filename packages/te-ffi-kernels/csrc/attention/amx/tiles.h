// Matmuls of bfloat16 on AMX tiles, and blocks of numbers as tiles take them: by pairs, in the 4
// bytes of a float, where all sizes are padded with zeros to whole tiles of 16 lines of 16.
#pragma once

// Of a panel: two tiles.
#define JAXTAP_COLUMNS 32

#include "attention/isa/panel.h"
// After it, which says how multiply-adds are compiled.
#include "common/amx_tile.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kTile = 16;            // lines of a tile, and numbers of 4 bytes in a line
constexpr int64_t kPairs = kBlock / 2;   // of the keys of a block
constexpr int64_t kPanelPairs = kCols / 2;  // of the rows of a panel
constexpr int64_t kStep = 2 * kTile;     // keys that fill a tile with pairs

inline int64_t whole(int64_t size) { return (size + kTile - 1) / kTile * kTile; }
inline int64_t whole_pairs(int64_t size) { return whole((size + 1) / 2); }

// All tiles whole, from its birth to its end.
class Tiles {
 public:
  Tiles() {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.set(i, kTile, 4 * kTile);
    tile_configure(config);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { tile_release(); }
};

// Of up to 2 by 2 tiles of c: tiles 0 to 3 are sums, 4 and 5 rows of a, 6 and 7 columns of b.
template <bool kTwoRows, bool kTwoColumns>
inline void multiply_tiles(int64_t depth, const float* a, int64_t a_stride, const float* b,
                           int64_t b_stride, float* c, int64_t c_stride, bool add) {
  const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, c_bytes = 4 * c_stride;
  float* second = c + kTile * c_stride;
  if (add) {
    tile_load<0>(c, c_bytes);
    if (kTwoColumns) tile_load<1>(c + kTile, c_bytes);
    if (kTwoRows) tile_load<2>(second, c_bytes);
    if (kTwoRows && kTwoColumns) tile_load<3>(second + kTile, c_bytes);
  } else {
    tile_zero<0>();
    if (kTwoColumns) tile_zero<1>();
    if (kTwoRows) tile_zero<2>();
    if (kTwoRows && kTwoColumns) tile_zero<3>();
  }
  for (int64_t k = 0; k < depth; k += kTile) {
    tile_load<6>(b + k * b_stride, b_bytes);
    tile_load<4>(a + k, a_bytes);
    tile_multiply_bf16<0, 4, 6>();
    if (kTwoColumns) {
      tile_load<7>(b + k * b_stride + kTile, b_bytes);
      tile_multiply_bf16<1, 4, 7>();
    }
    if (kTwoRows) {
      tile_load<5>(a + kTile * a_stride + k, a_bytes);
      tile_multiply_bf16<2, 5, 6>();
      if (kTwoColumns) tile_multiply_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(c, c_bytes);
  if (kTwoColumns) tile_store<1>(c + kTile, c_bytes);
  if (kTwoRows) tile_store<2>(second, c_bytes);
  if (kTwoRows && kTwoColumns) tile_store<3>(second + kTile, c_bytes);
}

// c[rows][columns] = (add: c +) a[rows][depth] b[depth][columns], of `depth` pairs. All three are
// multiples of kTile; strides are in numbers of 4 bytes.
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a,
                     int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, bool add) {
  for (int64_t r = 0; r < rows; r += 2 * kTile) {
    const float* left = a + r * a_stride;
    float* to = c + r * c_stride;
    for (int64_t col = 0; col < columns; col += 2 * kTile) {
      const bool two_rows = rows - r > kTile, two_columns = columns - col > kTile;
      auto* run = two_rows ? two_columns ? multiply_tiles<true, true> : multiply_tiles<true, false>
                  : two_columns ? multiply_tiles<false, true>
                                : multiply_tiles<false, false>;
      run(depth, left, a_stride, b + col, b_stride, to + col, c_stride, add);
    }
  }
}

inline void zero(float* to, int64_t count) {
  std::memset(to, 0, static_cast<size_t>(count) * sizeof(float));
}

// Neighbours of a row of bfloat16 as pairs, and zeros up to `width` pairs.
inline void pair_row(const char* row, int64_t size, float* to, int64_t width) {
  const auto bytes = static_cast<size_t>(2 * size);
  std::memcpy(to, row, bytes);
  std::memset(reinterpret_cast<char*>(to) + bytes, 0, static_cast<size_t>(4 * width) - bytes);
}

// Pairs of the same place in two rows (the second may be missing), and zeros up to `width`.
inline void pair_rows(const char* first, const char* second, int64_t size,
                      float* __restrict to, int64_t width) {
  const auto* __restrict low = reinterpret_cast<const uint16_t*>(first);
  const auto* __restrict high = reinterpret_cast<const uint16_t*>(second);
  if (second == nullptr) {
    for (int64_t i = 0; i < size; ++i) to[i] = bits_float(low[i]);
  } else {
    for (int64_t i = 0; i < size; ++i) {
      to[i] = bits_float(low[i] | static_cast<uint32_t>(high[i]) << 16);
    }
  }
  zero(to + size, width - size);
}

// A panel as columns of pairs, [whole_pairs(size)][kCols].
inline void pair_panel(const Problem& p, const Tokens& tokens, const Segment& segment,
                       const Rows& rows, const Panel& panel, int64_t size, float* to,
                       float* by_query) {
  const int64_t width = whole_pairs(size);
  for (int64_t r = 0; r < panel.rows; ++r) {
    pair_row(row_of(p, tokens, segment, rows, panel.begin + r), size, by_query + r * width, width);
  }
  zero(by_query + panel.rows * width, (kCols - panel.rows) * width);
  transpose(by_query, width, kCols, width, to, kCols);
}

// The rows of a panel by pairs of rows, [kPanelPairs][whole(size)].
inline void pair_panel_rows(const Problem& p, const Tokens& tokens, const Segment& segment,
                            const Rows& rows, const Panel& panel, int64_t size, float* to) {
  const int64_t width = whole(size);
  const int64_t pairs = (panel.rows + 1) / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t row = panel.begin + 2 * i;
    const char* second =
        2 * i + 1 < panel.rows ? row_of(p, tokens, segment, rows, row + 1) : nullptr;
    pair_rows(row_of(p, tokens, segment, rows, row), second, size, to + i * width, width);
  }
  zero(to + pairs * width, (kPanelPairs - pairs) * width);
}

// The rows of a block as pairs of neighbours, [kBlock][whole_pairs(size)].
inline void pair_block(const Problem& p, const Tokens& tokens, const Segment& segment,
                       int64_t kv_head, int64_t key, int64_t count, int64_t size, float* to) {
  const int64_t width = whole_pairs(size);
  for (int64_t i = 0; i < count; ++i) {
    pair_row(row_of(p, tokens, segment, kv_head, key + i), size, to + i * width, width);
  }
  zero(to + count * width, (kBlock - count) * width);
}

// The columns of a block as pairs of neighbours, [whole(size)][kPairs]. `by_key` is memory for
// [kPairs][whole(size)].
inline void pair_block_columns(const Problem& p, const Tokens& tokens, const Segment& segment,
                               int64_t kv_head, int64_t key, int64_t count, int64_t size,
                               float* to, float* by_key) {
  const int64_t width = whole(size);
  for (int64_t i = 0; i < kPairs; ++i) {
    float* line = by_key + i * width;
    if (2 * i >= count) {
      zero(line, width);
      continue;
    }
    const char* second =
        2 * i + 1 < count ? row_of(p, tokens, segment, kv_head, key + 2 * i + 1) : nullptr;
    pair_rows(row_of(p, tokens, segment, kv_head, key + 2 * i), second, size, line, width);
  }
  transpose(by_key, width, kPairs, width, to, kPairs);
}

// [count][kCols] of float32, rounded, as pairs of rows [count / 2][kCols].
inline void round_by_rows(const float* __restrict from, int64_t count, float* __restrict to) {
#if defined(__AVX512BF16__)
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i places = _mm512_load_si512(order);
#endif
  for (int64_t i = 0; i < count; i += 2) {
    const float* low = from + i * kCols;
    const float* high = low + kCols;
    float* pair = to + i / 2 * kCols;
#if defined(__AVX512BF16__)
    for (int64_t c = 0; c < kCols; c += 16) {
      const auto both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high + c),
                                                     _mm512_loadu_ps(low + c));
      _mm512_storeu_si512(pair + c, _mm512_permutexvar_epi16(places, both));
    }
#else
    for (int64_t c = 0; c < kCols; ++c) {
      pair[c] = bits_float(f32_to_bf16(low[c]) | static_cast<uint32_t>(f32_to_bf16(high[c])) << 16);
    }
#endif
  }
}

// The same as pairs of neighbours in each row, kPanelPairs of them every `stride`.
inline void round_by_columns(const float* __restrict from, int64_t count, float* __restrict to,
                             int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    const float* row = from + i * kCols;
#if defined(__AVX512BF16__)
    const __m512 low = _mm512_loadu_ps(row), high = _mm512_loadu_ps(row + 16);
    _mm512_storeu_si512(to + i * stride, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
    store_numbers(DType::BF16, row, kCols, to + i * stride);
#endif
  }
}

// The keys of a block that a panel sees, and as many more as make steps; those that there aren't
// are masked.
inline Range seen_steps(const Panel& panel, int64_t key, int64_t count) {
  const Range range = seen(panel, key, count);
  if (range.count() <= 0) return range;
  return {range.first / kStep * kStep, (range.last + kStep - 1) / kStep * kStep};
}

inline int64_t set_whole_panels(const Problem& p, const Segment& segment, const Rows& rows,
                                int64_t begin, int64_t end, Panel* panels) {
  const int64_t count = set_panels(p, segment, rows, begin, end, panels);
  for (int64_t i = 0; i < count; ++i) panels[i].columns = kCols;
  return count;
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
