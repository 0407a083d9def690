// The gradient of a block of scores, from queries, keys, values and the gradient of the result. Of
// one instruction set.
#pragma once

#include "attention/isa/panel.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

// What backward knows of a panel: queries and gradients of the result as columns, [size][kCols];
// of each column the log-sum-exp to the base 2 in two parts, of which the first has few digits, and
// the sum of result times gradient.
struct Known {
  float* queries;
  float* grads;
  float* log_sum;
  float* log_sum_rest;
  float* delta;
};

inline Known take_known(int64_t query_lines, int64_t grad_lines, Scratch& scratch) {
  return {scratch.take(query_lines * kCols), scratch.take(grad_lines * kCols),
          scratch.take(kCols), scratch.take(kCols), scratch.take(kCols)};
}

inline void know_log_sum(float natural, float& high, float& low) {
  high = kInfinity;  // without any key there are no probabilities
  low = 0;
  if (natural == -kInfinity) return;
  const double log_sum = static_cast<double>(natural) * kLog2E;
  // The first part and a whole number have an exact sum.
  high = static_cast<float>(__builtin_rint(log_sum * 256) / 256);
  low = static_cast<float>(log_sum - static_cast<double>(high));
}

// Its log_sum and delta; `lines` is memory for two rows.
inline void know_sums(const Problem& p, const Gradients& gradients, const Segment& segment,
                      const Rows& rows, const Panel& panel, const Known& known, float* lines) {
  const int64_t width = padded(p.v_size);
  for (int64_t c = 0; c < kCols; ++c) {
    known.log_sum[c] = known.log_sum_rest[c] = known.delta[c] = 0;
    if (c >= panel.rows) continue;
    const int64_t row = panel.begin + c;
    load_numbers(p.dtype, row_of(p, p.out, segment, rows, row), p.v_size, lines, width);
    load_numbers(p.dtype, row_of(p, gradients.out_grad, segment, rows, row), p.v_size,
                 lines + width, width);
    Vector sum{};
    for (int64_t i = 0; i < width; i += kWidth) sum += read(lines + i) * read(lines + width + i);
    for (int j = 0; j < kWidth; ++j) known.delta[c] += sum[j];
    know_log_sum(*aux_of(p, segment, rows, row), known.log_sum[c], known.log_sum_rest[c]);
  }
}

// The deltas of results [kCols][width]. They are subtracted from products of values with the
// gradient of the result, of which a probability near 1 leaves next to nothing: so they are added
// up in the same order.
inline void know_delta(const float* results, int64_t width, const Known& known) {
  alignas(64) float tile[kWidth * kWidth];
  for (int64_t c = 0; c < kCols; c += kWidth) {
    Vector delta{};
    for (int64_t begin = 0; begin < width; begin += tile::kDepth) {
      Vector sum{};
      for (int64_t i = begin; i < least(begin + tile::kDepth, width); i += kWidth) {
        transpose_tile(results + c * width + i, width, tile, kWidth);
        for (int64_t j = 0; j < kWidth; ++j) {
          sum += read(tile + j * kWidth) * read(known.grads + (i + j) * kCols + c);
        }
      }
      delta += sum;
    }
    write(known.delta + c, delta);
  }
}

// Reads it. `queries` and `grads` get the same as rows, [kCols][padded size]; `lines` is memory
// for a panel's rows.
inline void know_floats(const Problem& p, const Gradients& gradients, const Segment& segment,
                        const Rows& rows, const Panel& panel, const Known& known, float* queries,
                        float* grads, float* lines) {
  const int64_t qk_width = padded(p.qk_size), v_width = padded(p.v_size);
  load_panel(p, p.q, segment, rows, panel, p.qk_size, queries, qk_width);
  transpose(queries, qk_width, kCols, qk_width, known.queries, kCols);
  load_panel(p, gradients.out_grad, segment, rows, panel, p.v_size, grads, v_width);
  transpose(grads, v_width, kCols, v_width, known.grads, kCols);
  load_panel(p, p.out, segment, rows, panel, p.v_size, lines, v_width);
  know_delta(lines, v_width, known);
  for (int64_t c = 0; c < kCols; ++c) {
    known.log_sum[c] = known.log_sum_rest[c] = 0;
    if (c >= panel.rows) continue;
    know_log_sum(*aux_of(p, segment, rows, panel.begin + c), known.log_sum[c],
                 known.log_sum_rest[c]);
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
                          Two factor, float keep, const float* drop, float* scores,
                          float* grads) {
  for (int64_t c = 0; c < panel.columns; c += kWidth) {
    const Vector log_sum = read(known.log_sum + c), delta = read(known.delta + c);
    const Vector log_sum_rest = read(known.log_sum_rest + c);
    const Ints low = read(panel.low + c), high = read(panel.high + c);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = i * kCols + c;
      const Vector score = read(scores + place);
      const Vector about = score * factor.high - log_sum, shifted = about + all(kRound);
      const Vector rest = score * factor.high - (log_sum + (shifted - all(kRound)));
      Vector p = exp2_of(shifted, score * factor.low + (rest - log_sum_rest));
      p = about < all(kLeastExponent) ? Vector{} : p;
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

// `scores`, scaled with a bias and unscaled without, become the factors of the values
// (probabilities, with dropout), and `grads`, those of the probabilities, the gradients of the
// scores of softmax.
inline void differentiate(const Problem& p, const Segment& segment, const Rows& rows,
                          const Panel& panel, const Known& known, int64_t key, int64_t count,
                          float* scores, float* grads, float* drop) {
  const Two factor =
      two_of((p.bias_type != Bias::kNone ? 1.0 : static_cast<double>(p.scale)) * kLog2E);
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

// The scores of a range of a block in float32, and the gradients of their probabilities.
inline void score_floats(const FloatBlock& block, const Range& range, const Panel& panel,
                         const Known& known, float* scores, float* grads) {
  tile::multiply<tile::Left::kByRow>(range.count(), panel.columns, block.qk,
                                     block.keys + range.first * block.qk_width, block.qk_width,
                                     known.queries, kCols, scores, kCols, false);
  tile::multiply<tile::Left::kByRow>(range.count(), panel.columns, block.v,
                                     block.values + range.first * block.v_width, block.v_width,
                                     known.grads, kCols, grads, kCols, false);
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
