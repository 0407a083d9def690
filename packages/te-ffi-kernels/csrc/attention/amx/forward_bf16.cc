// Forward of bfloat16 on tiles. Scores and sums are float32; probabilities are rounded.

#include "attention/amx/tiles.h"
// After it, which says how wide panels are.
#include "attention/isa/softmax.h"
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kMostPanels = kForwardRows / kCols;

int64_t scratch_of(const Problem& p) {
  const int64_t qk_pairs = whole_pairs(p.qk_size), v_lines = whole(p.v_size);
  const int64_t blocks = kBlock * qk_pairs + 2 * kPairs * v_lines;
  const int64_t widest = most(most(qk_pairs, v_lines), kBlock);
  const int64_t state = (qk_pairs + v_lines + 2) * kCols;
  return blocks + kCols * widest + (2 * kBlock + kPairs) * kCols + kMostPanels * state;
}

void forward(const Problem& p, const Part& part, float* memory) {
  const Tiles tiles;
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size;
  const int64_t qk_pairs = whole_pairs(qk), v_lines = whole(v);

  Scratch scratch(memory);
  float* keys = scratch.take(kBlock * qk_pairs);
  float* values = scratch.take(kPairs * v_lines);
  float* by_key = scratch.take(kPairs * v_lines);
  float* by_query = scratch.take(kCols * most(most(qk_pairs, v_lines), kBlock));
  float* scores = scratch.take(kBlock * kCols);
  float* other = scratch.take(kBlock * kCols);
  float* rounded = scratch.take(kPairs * kCols);

  const bool has_bias = p.bias_type != Bias::kNone;
  const float unit = has_bias ? 1.0f : p.scale;
  const Two factor = two_of(static_cast<double>(unit) * kLog2E);

  Panel panels[kMostPanels];
  State states[kMostPanels];
  const int64_t count = set_whole_panels(p, segment, rows, part.begin, part.end, panels);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    states[i] = take_state(qk_pairs, v_lines, scratch);
    pair_panel(p, p.q, segment, rows, panels[i], qk, states[i].queries, by_query);
    first = least(first, panels[i].first_low);
    last = most(last, panels[i].last_high);
  }

  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    pair_block(p, p.k, segment, part.kv_head, key, block, qk, keys);
    pair_block_columns(p, p.v, segment, part.kv_head, key, block, v, values, by_key);
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      State& state = states[i];
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      if (key + kBlock > last) {
        prefetch_panel<1>(p, p.out, segment, rows, panel, v);
        if (part.next != nullptr) prefetch_part(p, *part.next, i, count);
      }
      const Range range = seen_steps(panel, key, block);
      const int64_t keys_seen = range.count(), from = key + range.first;
      if (keys_seen <= 0) continue;
      multiply(keys_seen, kCols, qk_pairs, keys + range.first * qk_pairs, qk_pairs, state.queries,
               kCols, scores, kCols, false);
      if (has_bias) {
        add_bias(p, segment, rows, panel, from, least(keys_seen, segment.kv_length - from), scores,
                 by_query, other);
      }
      if (!panel.sees_all(from, keys_seen)) mask(panel, from, keys_seen, scores);
      soften(scores, keys_seen, v, factor, panel, state);
      if (p.dropout > 0) {
        draw(p, segment, rows, panel, from, keys_seen, other);
        for (int64_t j = 0; j < keys_seen * kCols; ++j) scores[j] *= other[j];
      }
      round_by_rows(scores, keys_seen, rounded);
      multiply(v_lines, kCols, keys_seen / 2, values + range.first / 2, kPairs, rounded, kCols,
               state.sums, kCols, state.begun);
      state.begun = true;
    }
  }

  for (int64_t i = 0; i < count; ++i) {
    State& state = states[i];
    alignas(64) float factors[kCols];
    finish(p, segment, rows, panels[i], unit, state, factors);
    if (!state.begun) zero(state.sums, v_lines * kCols);
    store_panel(p, p.out, segment, rows, panels[i], v, state.sums, factors, by_query);
  }
}

}  // namespace

void set_forward_bf16(Table& table) {
  table.bf16.forward_scratch = scratch_of;
  table.bf16.forward = forward;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
