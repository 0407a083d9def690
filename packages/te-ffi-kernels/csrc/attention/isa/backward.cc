// Backward: probabilities anew from the log-sum-exp; gradients of queries for each panel, and sums
// over the part's queries for keys and values.

#include "attention/isa/gradient.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kMostPanels = kBackwardRows / kCols;

struct State {
  Known known;
  float* queries;  // [kCols][padded qk_size]
  float* grads;    // [kCols][padded v_size]
  float* sums;     // of the gradient of the queries, [padded qk_size][kCols]
  bool begun;
};

int64_t scratch_of(const Problem& p) {
  const int64_t qk_width = padded(p.qk_size), v_width = padded(p.v_size);
  const int64_t widest = most(most(qk_width, v_width), kBlock);
  const int64_t blocks = kBlock * (qk_width + v_width) + kCols * widest;
  const int64_t state = known_scratch(p) + (2 * qk_width + v_width) * kCols;
  return blocks + 3 * kBlock * kCols + kMostPanels * state + 16 * (8 + 8 * kMostPanels);
}

void backward(const Problem& p, const Gradients& gradients, const Part& part, const KeySums& sums,
              float* memory) {
  const Segment& segment = part.segment;
  const int64_t group = p.q_heads / p.kv_heads;
  const Rows rows{part.kv_head * group, group};
  const int64_t qk = p.qk_size, v = p.v_size, qk_width = padded(qk), v_width = padded(v);

  Scratch scratch(memory);
  float* keys = scratch.take(kBlock * qk_width);
  float* values = scratch.take(kBlock * v_width);
  float* by_query = scratch.take(kCols * most(most(qk_width, v_width), kBlock));
  float* scores = scratch.take(kBlock * kCols);
  float* grads = scratch.take(kBlock * kCols);
  float* other = scratch.take(kBlock * kCols);

  Panel panels[kMostPanels];
  State states[kMostPanels];
  const int64_t count = set_panels(p, segment, rows, part.begin, part.end, panels);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const Panel& panel = panels[i];
    State& state = states[i];
    state = {take_known(p, scratch), scratch.take(qk_width * kCols), scratch.take(v_width * kCols),
             scratch.take(qk_width * kCols), false};
    know(p, gradients, segment, rows, panel, state.known, state.queries, state.grads, by_query);
    first = least(first, panel.first_low);
    last = most(last, panel.last_high);
    add_sink_grads(p, segment, rows, panel, state.known, sums.sink);
  }

  for (int64_t key = first / kBlock * kBlock; key <= last; key += kBlock) {
    const int64_t block = least(kBlock, segment.kv_length - key);
    load_block(p, p.k, segment, part.kv_head, key, block, qk, keys, qk_width);
    load_block(p, p.v, segment, part.kv_head, key, block, v, values, v_width);
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      State& state = states[i];
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      const Range range = seen(panel, key, block);
      if (range.count() <= 0) continue;
      const int64_t from = key + range.first;
      const float* some_keys = keys + range.first * qk_width;
      score_grads(p, segment, rows, panel, state.known, from, range.count(), some_keys,
                  values + range.first * v_width, scores, grads, by_query, other);
      tile::multiply<tile::Left::kByRow>(range.count(), v_width, panel.rows, scores, kCols,
                                         state.grads, v_width, sums.v + from * sums.v_width,
                                         sums.v_width, true);
      tile::multiply<tile::Left::kByRow>(range.count(), qk_width, panel.rows, grads, kCols,
                                         state.queries, qk_width, sums.k + from * sums.k_width,
                                         sums.k_width, true);
      tile::multiply<tile::Left::kByColumn>(qk, panel.columns, range.count(), some_keys, qk_width,
                                            grads, kCols, state.sums, kCols, state.begun);
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

void store(const Problem& p, const Tokens& to, int64_t head, int64_t token, int64_t rows,
           int64_t size, const float* sums, int64_t width, float factor) {
  alignas(64) float line[256];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t index = index_of(to, token + i, head);
    for (int64_t begin = 0; begin < size; begin += 256) {
      const int64_t count = least(256, size - begin);
      for (int64_t j = 0; j < count; ++j) line[j] = sums[i * width + begin + j] * factor;
      store_numbers(p.dtype, line, count, at(to.data, p.dtype, index + begin));
    }
  }
}

void add(const float* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace

void set_backward(Table& table) {
  table.backward_rows = kBackwardRows;
  table.any.backward_scratch = scratch_of;
  table.any.backward = backward;
  table.store = store;
  table.add = add;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
