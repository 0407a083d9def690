// Backward of bfloat16 on tiles. Sums are float32; probabilities and the gradients of scores are
// rounded where they are factors.

#include "attention/amx/tiles.h"
// After it, which says how wide panels are.
#include "attention/isa/gradient.h"
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kMostPanels = kBackwardRows / kCols;

struct State {
  Known known;  // its columns are pairs
  float* sums;  // of the gradient of the queries, [whole(qk_size)][kCols]
  bool begun;
};

int64_t scratch_of(const Problem& p) {
  const int64_t qk_pairs = whole_pairs(p.qk_size), v_pairs = whole_pairs(p.v_size);
  const int64_t qk_lines = whole(p.qk_size), v_lines = whole(p.v_size);
  const int64_t blocks = kBlock * (qk_pairs + v_pairs) + 2 * kPairs * qk_lines;
  const int64_t widest = most(most(qk_lines, v_lines), kBlock);
  const int64_t state = (qk_pairs + v_pairs + 3 + qk_lines) * kCols;
  const int64_t panel = state + kPanelPairs * (qk_lines + v_lines + 2 * kBlock);
  return blocks + kCols * widest + (3 * kBlock + kPairs) * kCols + kMostPanels * panel;
}

void backward(const Problem& p, const Gradients& gradients, const Part& part, const KeySums& sums,
              float* memory) {
  const Tiles tiles;
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size;
  const int64_t qk_pairs = whole_pairs(qk), v_pairs = whole_pairs(v);
  const int64_t qk_lines = whole(qk), v_lines = whole(v);

  Panel panels[kMostPanels];
  State states[kMostPanels];
  const int64_t count = set_whole_panels(p, segment, rows, part.begin, part.end, panels);
  const int64_t stride = count * kPanelPairs;  // pairs of the part's rows

  Scratch scratch(memory);
  float* keys = scratch.take(kBlock * qk_pairs);
  float* key_columns = scratch.take(kPairs * qk_lines);
  float* by_key = scratch.take(kPairs * qk_lines);
  float* values = scratch.take(kBlock * v_pairs);
  float* by_query = scratch.take(kCols * most(most(qk_lines, v_lines), kBlock));
  float* scores = scratch.take(kBlock * kCols);
  float* grads = scratch.take(kBlock * kCols);
  float* other = scratch.take(kBlock * kCols);
  float* grad_rows = scratch.take(kPairs * kCols);
  // Of all panels, so that sums over queries go through memory but once in a block.
  float* queries = scratch.take(stride * qk_lines);
  float* out_grads = scratch.take(stride * v_lines);
  float* rounded_scores = scratch.take(kBlock * stride);
  float* rounded_grads = scratch.take(kBlock * stride);

  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const Panel& panel = panels[i];
    const Known known{scratch.take(qk_pairs * kCols), scratch.take(v_pairs * kCols),
                      scratch.take(kCols), scratch.take(kCols), scratch.take(kCols)};
    states[i] = {known, scratch.take(qk_lines * kCols), false};
    pair_panel(p, p.q, segment, rows, panel, qk, known.queries, by_query);
    pair_panel(p, gradients.out_grad, segment, rows, panel, v, known.grads, by_query);
    pair_panel_rows(p, p.q, segment, rows, panel, qk, queries + i * kPanelPairs * qk_lines);
    pair_panel_rows(p, gradients.out_grad, segment, rows, panel, v,
                    out_grads + i * kPanelPairs * v_lines);
    know_sums(p, gradients, segment, rows, panel, known, by_query);
    first = least(first, panel.first_low);
    last = most(last, panel.last_high);
    add_sink_grads(p, segment, rows, panel, known, sums.sink);
  }

  const bool has_bias = p.bias_type != Bias::kNone;
  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    pair_block(p, p.k, segment, part.kv_head, key, block, qk, keys);
    pair_block_columns(p, p.k, segment, part.kv_head, key, block, qk, key_columns, by_key);
    pair_block(p, p.v, segment, part.kv_head, key, block, v, values);
    int64_t begin = count, end = 0;  // the panels that see some of the block
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      State& state = states[i];
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      const Range range = seen_steps(panel, key, block);
      const int64_t keys_seen = range.count(), from = key + range.first;
      float* to_scores = rounded_scores + i * kPanelPairs;
      float* to_grads = rounded_grads + i * kPanelPairs;
      for (int64_t j = 0; j < kBlock; ++j) {
        if (keys_seen > 0 && j >= range.first && j < range.last) continue;
        zero(to_scores + j * stride, kPanelPairs);
        zero(to_grads + j * stride, kPanelPairs);
      }
      if (keys_seen <= 0) continue;
      begin = least(begin, i);
      end = i + 1;
      multiply(keys_seen, kCols, qk_pairs, keys + range.first * qk_pairs, qk_pairs,
               state.known.queries, kCols, scores, kCols, false);
      if (has_bias) {
        add_bias(p, segment, rows, panel, from, least(keys_seen, segment.kv_length - from), scores,
                 by_query, other);
      }
      multiply(keys_seen, kCols, v_pairs, values + range.first * v_pairs, v_pairs,
               state.known.grads, kCols, grads, kCols, false);
      differentiate(p, segment, rows, panel, state.known, from, keys_seen, scores, grads, other);
      round_by_columns(scores, keys_seen, to_scores + range.first * stride, stride);
      round_by_columns(grads, keys_seen, to_grads + range.first * stride, stride);
      round_by_rows(grads, keys_seen, grad_rows);
      multiply(qk_lines, kCols, keys_seen / 2, key_columns + range.first / 2, kPairs, grad_rows,
               kCols, state.sums, kCols, state.begun);
      state.begun = true;
    }
    if (begin >= end) continue;
    const int64_t pairs = (end - begin) * kPanelPairs, place = begin * kPanelPairs;
    multiply(kBlock, v_lines, pairs, rounded_scores + place, stride, out_grads + place * v_lines,
             v_lines, sums.v + key * sums.v_width, sums.v_width, true);
    multiply(kBlock, qk_lines, pairs, rounded_grads + place, stride, queries + place * qk_lines,
             qk_lines, sums.k + key * sums.k_width, sums.k_width, true);
  }

  alignas(64) float factors[kCols];
  for (float& factor : factors) factor = p.scale;
  for (int64_t i = 0; i < count; ++i) {
    State& state = states[i];
    if (!state.begun) zero(state.sums, qk_lines * kCols);
    store_panel(p, gradients.q_grad, segment, rows, panels[i], qk, state.sums, factors, by_query);
  }
}

}  // namespace

void set_backward_bf16(Table& table) {
  table.bf16.backward_scratch = scratch_of;
  table.bf16.backward = backward;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
