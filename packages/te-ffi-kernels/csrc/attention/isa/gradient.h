// The gradient of a block of scores, from queries, keys, values and the gradient of the result. Of
// one instruction set.
#pragma once

#include "attention/isa/panel.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

// What backward knows of a panel: queries and gradients of the result as columns, [size][kCols];
// of each column the log-sum-exp to the base 2, and the sum of result times gradient.
struct Known {
  float* queries;
  float* grads;
  float* log_sum;
  float* delta;
};

inline int64_t known_scratch(const Problem& p) {
  return (padded(p.qk_size) + padded(p.v_size) + 2) * kCols;
}

inline Known take_known(const Problem& p, Scratch& scratch) {
  return {scratch.take(padded(p.qk_size) * kCols), scratch.take(padded(p.v_size) * kCols),
          scratch.take(kCols), scratch.take(kCols)};
}

// To the base 2.
inline float log_sum_of(const Problem& p, const Segment& segment, const Rows& rows, int64_t row) {
  const float log_sum = *aux_of(p, segment, rows, row);
  // Without any key there are no probabilities.
  return log_sum == -kInfinity ? kInfinity : log_sum * kLog2E;
}

// Reads it. `queries` and `grads` get the same as rows, [kCols][padded size].
inline void know(const Problem& p, const Gradients& gradients, const Segment& segment,
                 const Rows& rows, const Panel& panel, const Known& known, float* queries,
                 float* grads, float* line) {
  const int64_t qk_width = padded(p.qk_size), v_width = padded(p.v_size);
  load_panel(p, p.q, segment, rows, panel, p.qk_size, queries, qk_width);
  transpose(queries, qk_width, kCols, qk_width, known.queries, kCols);
  load_panel(p, gradients.out_grad, segment, rows, panel, p.v_size, grads, v_width);
  transpose(grads, v_width, kCols, v_width, known.grads, kCols);
  for (int64_t c = 0; c < kCols; ++c) {
    known.log_sum[c] = known.delta[c] = 0;
    if (c >= panel.rows) continue;
    const int64_t row = panel.begin + c;
    const int64_t index = index_of(p.out, rows.token(segment, row), rows.head_of(row));
    load_numbers(p.dtype, at(p.out.data, p.dtype, index), p.v_size, line, v_width);
    Vector sum{};
    for (int64_t i = 0; i < v_width; i += kWidth) sum += read(line + i) * read(grads + c * v_width + i);
    for (int j = 0; j < kWidth; ++j) known.delta[c] += sum[j];
    known.log_sum[c] = log_sum_of(p, segment, rows, row);
  }
}

// A panel's part of the gradient of the sinks, [group].
inline void add_sink_grads(const Problem& p, const Segment& segment, const Rows& rows,
                           const Panel& panel, const Known& known, float* sums) {
  if (p.sink == nullptr) return;
  for (int64_t c = 0; c < panel.rows; ++c) {
    const int64_t head = rows.head_of(panel.begin + c);
    const float log_sum = *aux_of(p, segment, rows, panel.begin + c);
    if (log_sum == -kInfinity) continue;
    sums[head - rows.head] -= __builtin_expf(p.sink[head] - log_sum) * known.delta[c];
  }
}

template <bool kCut, bool kDrop>
inline void differentiate_block(const Panel& panel, const Known& known, int64_t key, int64_t count,
                          float factor, float keep, const float* drop, float* scores,
                          float* grads) {
  for (int64_t c = 0; c < panel.columns; c += kWidth) {
    const Vector log_sum = read(known.log_sum + c), delta = read(known.delta + c);
    const Ints low = read(panel.low + c), high = read(panel.high + c);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = i * kCols + c;
      Vector p = exp2_of(read(scores + place) * factor - log_sum);
      if (kCut) {
        const Ints now = all(static_cast<int32_t>(key + i));
        p = now < low ? Vector{} : p;
        p = now > high ? Vector{} : p;
      }
      if (kDrop) {
        const Vector kept = read(drop + place) * keep;
        write(scores + place, p * kept);
        write(grads + place, p * (read(grads + place) * kept - delta));
      } else {
        write(scores + place, p);
        write(grads + place, p * (read(grads + place) - delta));
      }
    }
  }
}

// `scores`, scaled with a bias and unscaled without, become the factors of the values (probabilities,
// with dropout), and `grads`, those of the probabilities, the gradients of the scores of softmax.
inline void differentiate(const Problem& p, const Segment& segment, const Rows& rows,
                          const Panel& panel, const Known& known, int64_t key, int64_t count,
                          float* scores, float* grads, float* drop) {
  const float factor = (p.bias_type != Bias::kNone ? 1.0f : p.scale) * kLog2E;
  const bool cut = !panel.sees_all(key, count);
  if (p.dropout > 0) {
    draw(p, segment, rows, panel, key, count, drop);
    auto* run = cut ? differentiate_block<true, true> : differentiate_block<false, true>;
    run(panel, known, key, count, factor, keep_scale(p), drop, scores, grads);
  } else {
    auto* run = cut ? differentiate_block<true, false> : differentiate_block<false, false>;
    run(panel, known, key, count, factor, 1.0f, drop, scores, grads);
  }
}

// The same of `count` keys from `key` on, whose keys and values are given.
inline void score_grads(const Problem& p, const Segment& segment, const Rows& rows,
                        const Panel& panel, const Known& known, int64_t key, int64_t count,
                        const float* keys, const float* values, float* scores, float* grads,
                        float* by_query, float* other) {
  tile::multiply<tile::Left::kByRow>(count, panel.columns, p.qk_size, keys, padded(p.qk_size),
                                     known.queries, kCols, scores, kCols, false);
  const bool has_bias = p.bias_type != Bias::kNone;
  if (has_bias) add_bias(p, segment, rows, panel, key, count, scores, by_query, other);
  tile::multiply<tile::Left::kByRow>(count, panel.columns, p.v_size, values, padded(p.v_size),
                                     known.grads, kCols, grads, kCols, false);
  differentiate(p, segment, rows, panel, known, key, count, scores, grads, other);
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
