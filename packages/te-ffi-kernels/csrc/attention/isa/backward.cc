// Backward, in float32; and what ends it, of all ways to multiply.

#include "attention/isa/backward.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

struct Floats : FloatBlock {
  Floats(const Problem& p, Scratch& scratch)
      : FloatBlock(p, scratch),
        query_width(qk_width),
        grad_width(v_width),
        sum_lines(qk_width),
        out_lines(v_width) {}

  // [kCols][qk_width] and [kCols][v_width].
  void take_rows(int64_t, BackwardState& state, Scratch& scratch) const {
    state.queries = scratch.take(kCols * qk_width);
    state.grads = scratch.take(kCols * v_width);
  }

  void begin(int64_t) {}
  void begin_block() {}
  void skip(int64_t) {}
  void end_block(int64_t, const KeySums&) {}

  void know(const Problem& p, const Gradients& gradients, const Segment& segment, const Rows& rows,
            const Panel& panel, const BackwardState& state, float* by_query) const {
    know_floats(p, gradients, segment, rows, panel, state.known, state.queries, state.grads,
                by_query);
  }

  void score(const Range& range, const Panel& panel, const Known& known, float* scores,
             float* grads) const {
    score_floats(*this, range, panel, known, scores, grads);
  }

  void add(int64_t, const Range& range, const Panel& panel, int64_t from, const float* scores,
           const float* grads, const KeySums& sums, const BackwardState& state) const {
    tile::multiply<tile::Left::kByRow>(range.count(), v_width, panel.rows, scores, kCols,
                                       state.grads, v_width, sums.v + from * sums.v_width,
                                       sums.v_width, true);
    tile::multiply<tile::Left::kByRow>(range.count(), qk_width, panel.rows, grads, kCols,
                                       state.queries, qk_width, sums.k + from * sums.k_width,
                                       sums.k_width, true);
    tile::multiply<tile::Left::kByColumn>(qk, panel.columns, range.count(),
                                          keys + range.first * qk_width, qk_width, grads, kCols,
                                          state.sums, kCols, state.begun);
  }

  int64_t query_width, grad_width, sum_lines, out_lines;
};

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
  set_backward_of<Floats>(table.any);
  table.store = store;
  table.add = add;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
