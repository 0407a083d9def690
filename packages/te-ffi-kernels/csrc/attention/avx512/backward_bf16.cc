// Backward of bfloat16 by pairs. Sums are float32; probabilities and the gradients of scores are
// rounded where they are factors.

#include "attention/avx512/pairs.h"
#include "attention/isa/gradient.h"
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kMostPanels = kBackwardRows / kCols;

struct State {
  Known known;     // its columns are pairs
  float* queries;  // pairs of rows, [kCols / 2][padded qk_size]
  float* grads;    // pairs of rows, [kCols / 2][padded v_size]
  float* sums;     // of the gradient of the queries, [padded qk_size][kCols]
  bool begun;
};

int64_t scratch_of(const Problem& p) {
  const int64_t qk_width = padded(p.qk_size), v_width = padded(p.v_size);
  const int64_t widest = most(most(qk_width, v_width), kBlock);
  const int64_t blocks = kBlock * (2 * qk_width + v_width) + kCols * widest;
  const int64_t state = known_scratch(p) + (2 * qk_width + v_width) * kCols;
  return blocks + 5 * kBlock * kCols + kMostPanels * state + 16 * (16 + 8 * kMostPanels);
}

void know_pairs(const Problem& p, const Gradients& gradients, const Segment& segment,
                const Rows& rows, const Panel& panel, const State& state, float* by_query) {
  const Known& known = state.known;
  pair_panel(p, p.q, segment, rows, panel, p.qk_size, known.queries, by_query);
  pair_panel(p, gradients.out_grad, segment, rows, panel, p.v_size, known.grads, by_query);
  pair_panel_rows(p, p.q, segment, rows, panel, p.qk_size, state.queries);
  pair_panel_rows(p, gradients.out_grad, segment, rows, panel, p.v_size, state.grads);
  know_sums(p, gradients, segment, rows, panel, known, by_query);
}

void backward(const Problem& p, const Gradients& gradients, const Part& part, const KeySums& sums,
              float* memory) {
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size, qk_width = padded(qk), v_width = padded(v);
  const int64_t qk_pairs = padded(pair_count(qk)), v_pairs = padded(pair_count(v));

  Scratch scratch(memory);
  float* keys = scratch.take(kBlock * qk_width);
  float* key_rows = scratch.take(kBlock * qk_width);
  float* values = scratch.take(kBlock * v_width);
  float* by_query = scratch.take(kCols * most(most(qk_width, v_width), kBlock));
  float* scores = scratch.take(kBlock * kCols);
  float* grads = scratch.take(kBlock * kCols);
  float* other = scratch.take(kBlock * kCols);
  float* rounded_scores = scratch.take(kBlock * kCols / 2);
  float* rounded_grads = scratch.take(kBlock * kCols / 2);
  float* grad_rows = scratch.take(kBlock * kCols / 2);

  const bool has_bias = p.bias_type != Bias::kNone;
  Panel panels[kMostPanels];
  State states[kMostPanels];
  const int64_t count = set_panels(p, segment, rows, part.begin, part.end, panels);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const Panel& panel = panels[i];
    State& state = states[i];
    state = {take_known(p, scratch), scratch.take(qk_width * kCols / 2),
             scratch.take(v_width * kCols / 2), scratch.take(qk_width * kCols), false};
    know_pairs(p, gradients, segment, rows, panel, state, by_query);
    first = least(first, panel.first_low);
    last = most(last, panel.last_high);
    add_sink_grads(p, segment, rows, panel, state.known, sums.sink);
  }

  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    pair_block(p, p.k, segment, part.kv_head, key, block, qk, keys);
    pair_block_rows(p, p.k, segment, part.kv_head, key, block, qk, key_rows);
    pair_block(p, p.v, segment, part.kv_head, key, block, v, values);
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      State& state = states[i];
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      const Range range = seen(panel, key, block);
      const int64_t keys_seen = range.count();
      if (keys_seen <= 0) continue;
      const int64_t from = key + range.first;
      multiply_pairs<Left::kByRow>(keys_seen, panel.columns, pair_count(qk),
                                   keys + range.first * qk_pairs, qk_pairs, state.known.queries,
                                   kCols, scores, kCols, false);
      if (has_bias) add_bias(p, segment, rows, panel, from, keys_seen, scores, by_query, other);
      multiply_pairs<Left::kByRow>(keys_seen, panel.columns, pair_count(v),
                                   values + range.first * v_pairs, v_pairs, state.known.grads,
                                   kCols, grads, kCols, false);
      differentiate(p, segment, rows, panel, state.known, from, keys_seen, scores, grads, other);
      round_by_columns(scores, keys_seen, rounded_scores);
      round_by_columns(grads, keys_seen, rounded_grads);
      round_by_rows(grads, keys_seen, panel.columns, grad_rows);
      multiply_pairs<Left::kByRow>(keys_seen, v_width, pair_count(panel.rows), rounded_scores,
                                   kCols / 2, state.grads, v_width, sums.v + from * sums.v_width,
                                   sums.v_width, true);
      multiply_pairs<Left::kByRow>(keys_seen, qk_width, pair_count(panel.rows), rounded_grads,
                                   kCols / 2, state.queries, qk_width,
                                   sums.k + from * sums.k_width, sums.k_width, true);
      multiply_pairs<Left::kByColumn>(qk, panel.columns, pair_count(keys_seen),
                                      key_rows + range.first / 2 * qk_width, qk_width, grad_rows,
                                      kCols, state.sums, kCols, state.begun);
      state.begun = true;
    }
  }

  alignas(64) float factors[kCols];
  for (float& factor : factors) factor = p.scale;
  for (int64_t i = 0; i < count; ++i) {
    State& state = states[i];
    if (!state.begun) {
      std::memset(state.sums, 0, static_cast<size_t>(qk_width * kCols) * sizeof(float));
    }
    store_panel(p, gradients.q_grad, segment, rows, panels[i], qk, state.sums, factors, by_query);
  }
}

}  // namespace

void set_backward_bf16(Table& table) {
  table.bf16.backward = backward;
  table.bf16.backward_scratch = scratch_of;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
