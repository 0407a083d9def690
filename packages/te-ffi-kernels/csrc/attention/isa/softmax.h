// Softmax of blocks of scores, with the sums of earlier blocks rescaled to a new maximum. Of one
// instruction set.
#pragma once

#include "attention/isa/panel.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

// What a panel has so far: queries [qk_size][kCols]; sums of values times probabilities
// [v_size][kCols]; each column's largest score, and its sum of probabilities.
struct State {
  float* queries;
  float* sums;
  float* largest;
  float* total;
  bool begun;
};

inline State take_state(int64_t query_lines, int64_t sum_lines, Scratch& scratch) {
  return {scratch.take(query_lines * kCols), scratch.take(sum_lines * kCols), scratch.take(kCols),
          scratch.take(kCols), false};
}

inline void begin_state(State& state) {
  for (int64_t c = 0; c < kCols; ++c) {
    state.largest[c] = -kInfinity;
    state.total[c] = 0;
  }
}

// Scores become probabilities to the base of the largest score so far: 2^((score - largest) *
// factor), with a factor that is not negative, and the panel's largest scores and sums follow.
inline void soften(float* scores, int64_t count, int64_t v_size, Two factor, const Panel& panel,
                   State& state) {
  bool moved = false;
  alignas(64) float shrink[kCols];
  for (int64_t c = 0; c < panel.columns; c += kWidth) {
    Vector top[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) top[j] = max(read(scores + (i + j) * kCols + c), top[j]);
    }
    for (; i < count; ++i) top[0] = max(read(scores + i * kCols + c), top[0]);
    const Vector before = read(state.largest + c);
    const Vector now = max(max(max(top[0], top[1]), max(top[2], top[3])), before);
    // Without any key so far there is nothing to subtract.
    const Vector base = now == all(-kInfinity) ? Vector{} : now;
    const Vector less = exp2_of(before - base, factor);
    Vector sum[2] = {};
    i = 0;
    for (; i + 2 <= count; i += 2) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        float* score = scores + (i + j) * kCols + c;
        const Vector p = exp2_of(read(score) - base, factor);
        sum[j] += p;
        write(score, p);
      }
    }
    for (; i < count; ++i) {
      float* score = scores + i * kCols + c;
      const Vector p = exp2_of(read(score) - base, factor);
      sum[0] += p;
      write(score, p);
    }
    write(state.largest + c, now);
    write(state.total + c, read(state.total + c) * less + (sum[0] + sum[1]));
    write(shrink + c, less);
  }
  if (!state.begun) return;
  for (int64_t c = 0; c < panel.columns; ++c) moved |= shrink[c] != 1.0f;
  if (!moved) return;
  for (int64_t c = 0; c < panel.columns; c += kWidth) {
    const Vector less = read(shrink + c);
    for (int64_t i = 0; i < v_size; ++i) {
      float* sum = state.sums + i * kCols + c;
      write(sum, read(sum) * less);
    }
  }
}

// The natural logarithm of a positive normal number; NaN stays NaN. In double, since it is added to
// another one.
inline double log_of(float x) {
  const uint32_t bits = float_bits(x) - 0x3f3504f3u;  // of sqrt(1/2)
  const auto whole = static_cast<int32_t>(bits) >> 23;
  const float rest = bits_float((bits & 0x7fffffu) + 0x3f3504f3u);
  const auto log = static_cast<double>(__builtin_logf(rest) + (x - x));
  return whole * 0.693147180559945309 + log;
}

// The factors that make probabilities of the sums; writes the log-sum-exp. `unit`: what scores are
// multiplied with to be natural ones.
inline void finish(const Problem& p, const Segment& segment, const Rows& rows, const Panel& panel,
            float unit, const State& state, float* factors) {
  const float keep = keep_scale(p);
  for (int64_t c = 0; c < panel.columns; ++c) {
    factors[c] = 0;
    if (c >= panel.rows) continue;
    const int64_t row = panel.begin + c;
    const double largest = state.total[c] == 0
                               ? -static_cast<double>(kInfinity)
                               : static_cast<double>(state.largest[c]) * static_cast<double>(unit);
    float total = state.total[c], factor = 1;
    double top = largest;
    if (p.sink != nullptr) {
      const float sink = p.sink[rows.head_of(row)];
      const auto wide = static_cast<double>(sink);
      top = wide > largest ? wide : largest;
      factor = total == 0 ? 0 : __builtin_expf(static_cast<float>(largest - top));
      const float extra =
          sink == -kInfinity ? 0 : __builtin_expf(static_cast<float>(wide - top));
      total = total * factor + extra;
    }
    factors[c] = total == 0 ? 0 : keep * factor / total;
    float& log_sum = *aux_of(p, segment, rows, row);
    log_sum = total == 0 ? -kInfinity : static_cast<float>(top + log_of(total));
  }
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
