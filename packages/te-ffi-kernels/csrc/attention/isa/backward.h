// Backward of a part of the rows, over a way to multiply: probabilities once more from the
// log-sum-exp; gradients of queries for each panel, and sums over the part's queries for keys and
// values. Of one instruction set.
#pragma once

#include "attention/isa/gradient.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kBackwardPanels = kBackwardRows / kCols;

// Of a panel. Queries and gradients of the result are known twice: as columns, in `known`, and as
// rows, both as `Math` multiplies them.
struct BackwardState {
  Known known;
  float *queries, *grads;
  float* sums;  // of the gradient of the queries, [sum_lines][kCols]
  bool begun;
};

// What backward needs, taken from memory in one place as in ForwardMemory. `Math` has:
//   Scope, kStep, load  as in forward
//   query_width, grad_width  of columns: Known::queries is [query_width][kCols]
//   sum_lines, out_lines     of rows: the numbers of a query and of a gradient of the result
//   take_rows           memory of a panel's rows
//   begin               a part with so many panels
//   know                reads a panel's queries, gradients and sums
//   begin_block         of keys
//   score               scores = keys * queries; grads = values * gradients of the result
//   skip                a panel that sees nothing of the block
//   add                 to the sums of keys and values, and to those of the panel's queries
//   end_block           where sums of keys and values are left to the end of a block
template <class Math>
struct BackwardMemory {
  BackwardMemory(const Problem& p, Scratch& scratch)
      : math(p, scratch),
        by_query(scratch.take(kCols * most(most(math.sum_lines, math.out_lines), kBlock))),
        scores(scratch.take(kBlock * kCols)),
        grads(scratch.take(kBlock * kCols)),
        other(scratch.take(kBlock * kCols)) {
    for (int64_t i = 0; i < kBackwardPanels; ++i) {
      BackwardState& state = states[i];
      state.known = take_known(math.query_width, math.grad_width, scratch);
      math.take_rows(i, state, scratch);
      state.sums = scratch.take(math.sum_lines * kCols);
      state.begun = false;
    }
  }

  Math math;
  float *by_query, *scores, *grads, *other;
  BackwardState states[kBackwardPanels];
};

template <class Math>
int64_t backward_scratch(const Problem& p) {
  Scratch counted(nullptr);
  const BackwardMemory<Math> memory(p, counted);
  return counted.taken();
}

template <class Math>
void backward_part(const Problem& p, const Gradients& gradients, const Part& part,
                   const KeySums& sums, float* data) {
  [[maybe_unused]] const typename Math::Scope scope{};
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size;
  Scratch scratch(data);
  BackwardMemory<Math> memory(p, scratch);
  Math& math = memory.math;
  float *by_query = memory.by_query, *other = memory.other;
  float *scores = memory.scores, *grads = memory.grads;

  Panel panels[kBackwardPanels];
  const int64_t count = set_panels<Math::kStep>(p, segment, rows, part.begin, part.end, panels);
  math.begin(count);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const Panel& panel = panels[i];
    math.know(p, gradients, segment, rows, panel, memory.states[i], by_query);
    first = least(first, panel.first_low);
    last = most(last, panel.last_high);
    add_sink_grads(p, segment, rows, panel, memory.states[i].known, sums.sink);
  }

  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    math.load(p, segment, part.kv_head, key, block);
    math.begin_block();
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      BackwardState& state = memory.states[i];
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      const Range range = seen<Math::kStep>(panel, key, block);
      const int64_t keys_seen = range.count(), from = key + range.first;
      if (keys_seen <= 0) {
        math.skip(i);
        continue;
      }
      math.score(range, panel, state.known, scores, grads);
      if (p.bias_type != Bias::kNone) {
        add_bias(p, segment, rows, panel, from, least(keys_seen, segment.kv_length - from), scores,
                 by_query, other);
      }
      differentiate(p, segment, rows, panel, state.known, from, keys_seen, scores, grads, other);
      math.add(i, range, panel, from, scores, grads, sums, state);
      state.begun = true;
    }
    math.end_block(key, sums);
  }

  alignas(64) float factors[kCols];
  for (float& factor : factors) factor = p.scale;
  for (int64_t i = 0; i < count; ++i) {
    BackwardState& state = memory.states[i];
    if (!state.begun) zero(state.sums, math.sum_lines * kCols);
    store_panel(p, gradients.q_grad, segment, rows, panels[i], qk, state.sums, factors, by_query);
  }
}

template <class Math>
void set_backward_of(Method& method) {
  method.backward_scratch = backward_scratch<Math>;
  method.backward = backward_part<Math>;
}

}  // namespace
}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
