// Forward of bfloat16 by pairs. Scores and sums are float32; probabilities are rounded.

#include "attention/avx512/pairs.h"
#include "attention/isa/softmax.h"
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kMostPanels = kForwardRows / kCols;

void forward(const Problem& p, const Part& part, float* memory) {
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size, qk_width = padded(qk), v_width = padded(v);
  const int64_t pair_width = padded(pair_count(qk));

  Scratch scratch(memory);
  float* keys = scratch.take(kBlock * qk_width);
  float* values = scratch.take(kBlock * v_width);
  float* by_query = scratch.take(kCols * most(most(qk_width, v_width), kBlock));
  float* scores = scratch.take(kBlock * kCols);
  float* other = scratch.take(kBlock * kCols);

  const bool has_bias = p.bias_type != Bias::kNone;
  const float unit = has_bias ? 1.0f : p.scale;
  const Two factor = two_of(static_cast<double>(unit) * kLog2E);

  Panel panels[kMostPanels];
  State states[kMostPanels];
  const int64_t count = set_panels(p, segment, rows, part.begin, part.end, panels);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    states[i] = take_state(qk_width, v_width, scratch);
    pair_panel(p, p.q, segment, rows, panels[i], qk, states[i].queries, by_query);
    first = least(first, panels[i].first_low);
    last = most(last, panels[i].last_high);
  }

  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    pair_block(p, p.k, segment, part.kv_head, key, block, qk, keys);
    pair_block_rows(p, p.v, segment, part.kv_head, key, block, v, values);
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      State& state = states[i];
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      if (key + kBlock > last) {
        prefetch_panel<1>(p, p.out, segment, rows, panel, v);
        if (part.next != nullptr) prefetch_part(p, *part.next, i, count);
      }
      const Range range = seen(panel, key, block);
      if (range.count() <= 0) continue;
      const int64_t from = key + range.first;
      multiply_pairs<Left::kByRow>(range.count(), panel.columns, pair_count(qk),
                                   keys + range.first * pair_width, pair_width, state.queries,
                                   kCols, scores, kCols, false);
      if (has_bias) {
        add_bias(p, segment, rows, panel, from, range.count(), scores, by_query, other);
      }
      if (!panel.sees_all(from, range.count())) mask(panel, from, range.count(), scores);
      soften(scores, range.count(), v, factor, panel, state);
      if (p.dropout > 0) {
        draw(p, segment, rows, panel, from, range.count(), other);
        for (int64_t j = 0; j < range.count() * kCols; ++j) scores[j] *= other[j];
      }
      round_by_rows(scores, range.count(), panel.columns, other);
      multiply_pairs<Left::kByColumn>(v, panel.columns, pair_count(range.count()),
                                      values + range.first / 2 * v_width, v_width, other, kCols,
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

void set_forward_bf16(Table& table) {
  table.bf16.forward = forward;
  table.bf16.forward_scratch = table.any.forward_scratch;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
