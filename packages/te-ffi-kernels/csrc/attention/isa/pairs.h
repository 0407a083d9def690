// Numbers of bfloat16 by pairs, in the 4 bytes of a float, as processors with AVX512-BF16 and AMX
// multiply them: a pair of the left factor with a pair of the right one, added in float32. Lines of
// them are padded with zeros to whole lines of 16. Of one instruction set.
//
// `Unit` multiplies:
//   Scope, kStep        as in forward.h
//   lines               how many lines it multiplies for a size
//   multiply            c[rows][columns] = (add: c +) a[rows][depth] b[depth][columns], of `depth`
//                       pairs; strides are in numbers of 4 bytes
//   Columns             a left factor whose lines are columns of a block: it knows how they lie
#pragma once

#include "attention/isa/backward.h"
#include "attention/isa/forward.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kLine = 16;               // numbers of 4 bytes
constexpr int64_t kPairs = kBlock / 2;      // of the keys of a block
constexpr int64_t kPanelPairs = kCols / 2;  // of the rows of a panel
static_assert(kCols % kLine == 0, "panels have whole lines");

inline int64_t whole(int64_t size) { return (size + kLine - 1) / kLine * kLine; }
inline int64_t pair_count(int64_t size) { return (size + 1) / 2; }
inline int64_t whole_pairs(int64_t size) { return whole(pair_count(size)); }

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
  const int64_t pairs = pair_count(panel.rows);
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

// The rows of a block by pairs of rows, [kPairs][whole(size)].
inline void pair_block_rows(const Problem& p, const Tokens& tokens, const Segment& segment,
                            int64_t kv_head, int64_t key, int64_t count, int64_t size, float* to) {
  const int64_t width = whole(size), pairs = pair_count(count);
  for (int64_t i = 0; i < pairs; ++i) {
    const char* second =
        2 * i + 1 < count ? row_of(p, tokens, segment, kv_head, key + 2 * i + 1) : nullptr;
    pair_rows(row_of(p, tokens, segment, kv_head, key + 2 * i), second, size, to + i * width,
              width);
  }
  zero(to + pairs * width, (kPairs - pairs) * width);
}

// [count][kCols] of float32, rounded, as pairs of rows [pair_count(count)][kCols].
inline void round_by_rows(const float* __restrict from, int64_t count, int64_t columns,
                          float* __restrict to) {
  static constexpr float kNone[kCols] = {};
#if defined(__AVX512BF16__)
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i places = _mm512_load_si512(order);
#endif
  for (int64_t i = 0; i < count; i += 2) {
    const float* low = from + i * kCols;
    const float* high = i + 1 < count ? low + kCols : kNone;
    float* pair = to + i / 2 * kCols;
#if defined(__AVX512BF16__)
    for (int64_t c = 0; c < columns; c += 16) {
      const auto both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high + c),
                                                     _mm512_loadu_ps(low + c));
      _mm512_storeu_si512(pair + c, _mm512_permutexvar_epi16(places, both));
    }
#else
    for (int64_t c = 0; c < columns; ++c) {
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

template <class Unit>
struct PairedForward {
  using Scope = typename Unit::Scope;
  static constexpr int64_t kStep = Unit::kStep;

  PairedForward(const Problem& p, Scratch& scratch)
      : qk(p.qk_size),
        query_width(whole_pairs(qk)),
        sum_lines(whole(p.v_size)),
        keys(scratch.take(kBlock * query_width)),
        rounded(scratch.take(kPairs * kCols)),
        values(p.v_size, scratch) {}

  void load_queries(const Problem& p, const Segment& segment, const Rows& rows, const Panel& panel,
                    float* queries, float* by_query) const {
    pair_panel(p, p.q, segment, rows, panel, qk, queries, by_query);
  }

  void load(const Problem& p, const Segment& segment, int64_t kv_head, int64_t key,
            int64_t count) const {
    pair_block(p, p.k, segment, kv_head, key, count, qk, keys);
    values.load(p, p.v, segment, kv_head, key, count);
  }

  void score(const Range& range, const Panel& panel, const float* queries, float* scores) const {
    Unit::multiply(range.count(), panel.columns, Unit::lines(pair_count(qk)),
                   keys + range.first * query_width, query_width, queries, kCols, scores, kCols,
                   false);
  }

  void sum(const Range& range, const Panel& panel, const float* scores, State& state) const {
    round_by_rows(scores, range.count(), panel.columns, rounded);
    values.multiply(range, panel.columns, rounded, state.sums, state.begun);
  }

  int64_t qk, query_width, sum_lines;
  float *keys, *rounded;
  typename Unit::Columns values;
};

// What backward of both units has in common: all but the sums of keys and values.
template <class Unit>
struct PairedBackward {
  using Scope = typename Unit::Scope;
  static constexpr int64_t kStep = Unit::kStep;

  PairedBackward(const Problem& p, Scratch& scratch)
      : qk(p.qk_size),
        v(p.v_size),
        query_width(whole_pairs(qk)),
        grad_width(whole_pairs(v)),
        sum_lines(whole(qk)),
        out_lines(whole(v)),
        keys(scratch.take(kBlock * query_width)),
        values(scratch.take(kBlock * grad_width)),
        grad_rows(scratch.take(kPairs * kCols)),
        key_columns(qk, scratch) {}

  void know(const Problem& p, const Gradients& gradients, const Segment& segment, const Rows& rows,
            const Panel& panel, const BackwardState& state, float* by_query) const {
    const Known& known = state.known;
    pair_panel(p, p.q, segment, rows, panel, qk, known.queries, by_query);
    pair_panel(p, gradients.out_grad, segment, rows, panel, v, known.grads, by_query);
    pair_panel_rows(p, p.q, segment, rows, panel, qk, state.queries);
    pair_panel_rows(p, gradients.out_grad, segment, rows, panel, v, state.grads);
    know_sums(p, gradients, segment, rows, panel, known, by_query);
  }

  void load(const Problem& p, const Segment& segment, int64_t kv_head, int64_t key,
            int64_t count) const {
    pair_block(p, p.k, segment, kv_head, key, count, qk, keys);
    key_columns.load(p, p.k, segment, kv_head, key, count);
    pair_block(p, p.v, segment, kv_head, key, count, v, values);
  }

  void score(const Range& range, const Panel& panel, const Known& known, float* scores,
             float* grads) const {
    Unit::multiply(range.count(), panel.columns, Unit::lines(pair_count(qk)),
                   keys + range.first * query_width, query_width, known.queries, kCols, scores,
                   kCols, false);
    Unit::multiply(range.count(), panel.columns, Unit::lines(pair_count(v)),
                   values + range.first * grad_width, grad_width, known.grads, kCols, grads, kCols,
                   false);
  }

  void add_queries(const Range& range, const Panel& panel, const float* grads,
                   const BackwardState& state) const {
    round_by_rows(grads, range.count(), panel.columns, grad_rows);
    key_columns.multiply(range, panel.columns, grad_rows, state.sums, state.begun);
  }

  int64_t qk, v, query_width, grad_width, sum_lines, out_lines;
  float *keys, *values, *grad_rows;
  typename Unit::Columns key_columns;
};

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
