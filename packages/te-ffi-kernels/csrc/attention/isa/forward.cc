// Forward, in float32.

#include "attention/isa/softmax.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

constexpr int64_t kMostPanels = kForwardRows / kCols;

int64_t scratch_of(const Problem& p) {
  const int64_t width = padded(p.qk_size) + padded(p.v_size);
  const int64_t widest = most(most(padded(p.qk_size), padded(p.v_size)), kBlock);
  const int64_t blocks = kBlock * width + kCols * widest;
  const int64_t scores = 2 * kBlock * kCols;
  const int64_t state = kMostPanels * (width + 2) * kCols;
  return blocks + scores + state + 16 * (6 + 4 * kMostPanels);
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

  // Scores stay as the matmul gives them where their order is that of the scaled ones.
  const bool has_bias = p.bias_type != Bias::kNone;
  const bool scale_first = !has_bias && !(p.scale > 0);
  const float unit = has_bias || scale_first ? 1.0f : p.scale;
  const Two factor = two_of(static_cast<double>(unit) * kLog2E);

  Panel panels[kMostPanels];
  State states[kMostPanels];
  const int64_t count = set_panels(p, segment, rows, part.begin, part.end, panels);
  int64_t first = segment.kv_length, last = -1;
  for (int64_t i = 0; i < count; ++i) {
    State& state = states[i];
    state = take_state(qk_width, v_width, scratch);
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
      prefetch_block(p, p.k, segment, part.kv_head, key + kBlock, i, count, qk);
      prefetch_block(p, p.v, segment, part.kv_head, key + kBlock, i, count, v);
      if (key + kBlock > last) {
        prefetch_panel<1>(p, p.out, segment, rows, panel, v);
        if (part.next != nullptr) prefetch_part(p, *part.next, i, count);
      }
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
      soften(scores, range.count(), v, factor, panel, state);
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
  table.columns = kCols;
  table.forward_rows = kForwardRows;
  table.any.forward_scratch = scratch_of;
  table.any.forward = forward;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
