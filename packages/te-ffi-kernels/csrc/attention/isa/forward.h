// Forward of a part of the rows, over a way to multiply. Of one instruction set.
#pragma once

#include "attention/isa/softmax.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kForwardPanels = kForwardRows / kCols;

// What forward needs. It is taken from memory in one place, which also counts it: see
// forward_scratch.
//
// `Math` multiplies, of a problem with which it is made, and has memory for a block of keys and
// values. The shapes below are its own, but for scores, which are [kBlock][kCols].
//   Scope               exists while it multiplies
//   kStep               a panel sees multiples of so many keys of a block, masked beyond
//   query_width         of a query, as State::queries has it: [query_width][kCols]
//   sum_lines           of State::sums: [sum_lines][kCols]
//   load_queries        of a panel
//   load                the keys and values of a block
//   score               scores = keys * queries, of the keys of a range of the block
//   sum                 sums (+)= values * probabilities
template <class Math>
struct ForwardMemory {
  ForwardMemory(const Problem& p, Scratch& scratch)
      : math(p, scratch),
        by_query(scratch.take(kCols * most(most(math.query_width, math.sum_lines), kBlock))),
        scores(scratch.take(kBlock * kCols)),
        other(scratch.take(kBlock * kCols)) {
    for (State& state : states) state = take_state(math.query_width, math.sum_lines, scratch);
  }

  Math math;
  float *by_query, *scores, *other;
  State states[kForwardPanels];
};

template <class Math>
int64_t forward_scratch(const Problem& p) {
  Scratch counted(nullptr);
  const ForwardMemory<Math> memory(p, counted);
  return counted.taken();
}

template <class Math>
void forward_part(const Problem& p, const Part& part, float* data) {
  [[maybe_unused]] const typename Math::Scope scope{};
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size;
  Scratch scratch(data);
  ForwardMemory<Math> memory(p, scratch);
  Math& math = memory.math;
  float *by_query = memory.by_query, *scores = memory.scores, *other = memory.other;

  // Scores stay as the matmul gives them where their order is that of the scaled ones. Otherwise
  // the bias scales them, or queries are scaled when they are loaded.
  const bool has_bias = p.bias_type != Bias::kNone;
  const float unit = has_bias || scales_queries(p) ? 1.0f : p.scale;
  const Two factor = two_of(static_cast<double>(unit) * kLog2E);

  Panel panels[kForwardPanels];
  const int64_t count = set_panels<Math::kStep>(p, segment, rows, part.begin, part.end, panels);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    begin_state(memory.states[i]);
    math.load_queries(p, segment, rows, panels[i], memory.states[i].queries, by_query);
    first = least(first, panels[i].first_low);
    last = most(last, panels[i].last_high);
  }

  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    math.load(p, segment, part.kv_head, key, block);
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      State& state = memory.states[i];
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      if (key + kBlock > last) {
        prefetch_panel<1>(p, p.out, segment, rows, panel, v);
        if (part.next != nullptr) prefetch_part(p, *part.next, i, count);
      }
      const Range range = seen<Math::kStep>(panel, key, block);
      const int64_t keys_seen = range.count(), from = key + range.first;
      if (keys_seen <= 0) continue;
      math.score(range, panel, state.queries, scores);
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
      math.sum(range, panel, scores, state);
      state.begun = true;
    }
  }

  for (int64_t i = 0; i < count; ++i) {
    State& state = memory.states[i];
    alignas(64) float factors[kCols];
    finish(p, segment, rows, panels[i], unit, state, factors);
    if (!state.begun) zero(state.sums, math.sum_lines * kCols);
    store_panel(p, p.out, segment, rows, panels[i], v, state.sums, factors, by_query);
  }
}

template <class Math>
void set_forward_of(Method& method) {
  method.forward_scratch = forward_scratch<Math>;
  method.forward = forward_part<Math>;
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
