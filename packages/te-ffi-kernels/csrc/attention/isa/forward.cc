// Forward: softmax of blocks of scores, with the sums of earlier blocks rescaled to a new maximum.

#include "attention/isa/panel.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

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

int64_t scratch_of(const Problem& p) {
  const int64_t width = padded(p.qk_size) + padded(p.v_size);
  const int64_t widest = most(most(padded(p.qk_size), padded(p.v_size)), kBlock);
  const int64_t blocks = kBlock * width + kCols * widest;
  const int64_t scores = 2 * kBlock * kCols;
  const int64_t state = kMostPanels * (width + 2) * kCols;
  return blocks + scores + state + 16 * (6 + 4 * kMostPanels);
}

// Scores become probabilities to the base of the largest score so far: 2^((score - largest) *
// factor), and the panel's largest scores and sums follow.
inline void soften(float* scores, int64_t count, int64_t v_size, float factor, const Panel& panel,
                   State& state) {
  bool moved = false;
  alignas(64) float shrink[kCols];
  for (int64_t c = 0; c < panel.columns; c += kWidth) {
    Vector top[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) top[j] = greater(read(scores + (i + j) * kCols + c), top[j]);
    }
    for (; i < count; ++i) top[0] = greater(read(scores + i * kCols + c), top[0]);
    const Vector before = read(state.largest + c);
    const Vector now = greater(greater(greater(top[0], top[1]), greater(top[2], top[3])), before);
    // Without any key so far there is nothing to subtract.
    const Vector base = now == all(-kInfinity) ? Vector{} : now;
    const Vector less = exp2_of((before - base) * factor);
    Vector sum[2] = {};
    i = 0;
    for (; i + 2 <= count; i += 2) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        float* score = scores + (i + j) * kCols + c;
        const Vector p = exp2_of((read(score) - base) * factor);
        sum[j] += p;
        write(score, p);
      }
    }
    for (; i < count; ++i) {
      float* score = scores + i * kCols + c;
      const Vector p = exp2_of((read(score) - base) * factor);
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

// The factors that make probabilities of the sums; writes the log-sum-exp. `unit`: what scores are
// multiplied with to be natural ones.
void finish(const Problem& p, const Segment& segment, const Rows& rows, const Panel& panel,
            float unit, const State& state, float* factors) {
  const float keep = keep_scale(p);
  for (int64_t c = 0; c < panel.columns; ++c) {
    factors[c] = 0;
    if (c >= panel.rows) continue;
    const int64_t row = panel.begin + c;
    const float largest = state.total[c] == 0 ? -kInfinity : state.largest[c] * unit;
    float total = state.total[c], factor = 1, top = largest;
    if (p.sink != nullptr) {
      const float sink = p.sink[rows.head_of(row)];
      top = sink > largest ? sink : largest;
      factor = largest == -kInfinity ? 0 : __builtin_expf(largest - top);
      total = total * factor + (sink == -kInfinity ? 0 : __builtin_expf(sink - top));
    }
    factors[c] = total == 0 ? 0 : keep * factor / total;
    *aux_of(p, segment, rows, row) = total == 0 ? -kInfinity : top + __builtin_logf(total);
  }
}

void forward(const Problem& p, const Part& part, float* memory) {
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size, qk_width = padded(qk), v_width = padded(v);

  Scratch scratch(memory);
  float* keys = scratch.take(kBlock * qk_width);
  float* values = scratch.take(kBlock * v_width);
  float* by_query = scratch.take(kCols * most(most(qk_width, v_width), kBlock));
  float* scores = scratch.take(kBlock * kCols);
  float* other = scratch.take(kBlock * kCols);

  // Scores stay as the product gives them where their order is that of the scaled ones.
  const bool has_bias = p.bias_type != Bias::kNone;
  const bool scale_first = !has_bias && !(p.scale > 0);
  const float unit = has_bias || scale_first ? 1.0f : p.scale;

  Panel panels[kMostPanels];
  State states[kMostPanels];
  const int64_t count = set_panels(p, segment, rows, part.begin, part.end, panels);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    State& state = states[i];
    state = {scratch.take(qk_width * kCols), scratch.take(v_width * kCols), scratch.take(kCols),
             scratch.take(kCols), false};
    for (int64_t c = 0; c < kCols; ++c) {
      state.largest[c] = -kInfinity;
      state.total[c] = 0;
    }
    load_panel(p, p.q, segment, rows, panels[i], qk, by_query, qk_width);
    transpose(by_query, qk_width, kCols, qk_width, state.queries, kCols);
    if (scale_first) {
      for (int64_t j = 0; j < qk_width * kCols; ++j) state.queries[j] *= p.scale;
    }
    first = least(first, panels[i].first_low);
    last = most(last, panels[i].last_high);
  }

  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    load_block(p, p.k, segment, part.kv_head, key, block, qk, keys, qk_width);
    load_block(p, p.v, segment, part.kv_head, key, block, v, values, v_width);
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      State& state = states[i];
      const Range range = seen(panel, key, block);
      if (range.count() <= 0) continue;
      const int64_t from = key + range.first;
      tile::multiply<tile::Left::kByRow>(range.count(), panel.columns, qk,
                                         keys + range.first * qk_width, qk_width, state.queries,
                                         kCols, scores, kCols, false);
      if (has_bias) {
        add_bias(p, segment, rows, panel, from, range.count(), scores, by_query, other);
      }
      if (!panel.sees_all(from, range.count())) mask(panel, from, range.count(), scores);
      soften(scores, range.count(), v, unit * kLog2E, panel, state);
      if (p.dropout > 0) {
        draw(p, segment, rows, panel, from, range.count(), other);
        for (int64_t j = 0; j < range.count() * kCols; ++j) scores[j] *= other[j];
      }
      tile::multiply<tile::Left::kByColumn>(v, panel.columns, range.count(),
                                            values + range.first * v_width, v_width, scores, kCols,
                                            state.sums, kCols, state.begun);
      state.begun = true;
    }
  }

  for (int64_t i = 0; i < count; ++i) {
    State& state = states[i];
    alignas(64) float factors[kCols];
    finish(p, segment, rows, panels[i], unit, state, factors);
    if (!state.begun) {
      std::memset(state.sums, 0, static_cast<size_t>(v_width * kCols) * sizeof(float));
    }
    store_panel(p, p.out, segment, rows, panels[i], v, state.sums, factors, by_query);
  }
}

}  // namespace

void set_forward(Table& table) {
  table.width = kWidth;
  table.columns = kCols;
  table.part_rows = kPartRows;
  table.forward_scratch = scratch_of;
  table.forward = forward;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
