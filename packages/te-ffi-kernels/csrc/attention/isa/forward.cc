// Forward, in float32.

#include "attention/isa/forward.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

struct Floats : FloatBlock {
  Floats(const Problem& p, Scratch& scratch)
      : FloatBlock(p, scratch), query_width(qk_width), sum_lines(v_width) {}

  void load_queries(const Problem& p, const Segment& segment, const Rows& rows, const Panel& panel,
                    float* queries, float* by_query) const {
    load_panel(p, p.q, segment, rows, panel, qk, by_query, qk_width);
    transpose(by_query, qk_width, kCols, qk_width, queries, kCols);
    if (!scales_queries(p)) return;
    for (int64_t j = 0; j < qk_width * kCols; ++j) queries[j] *= p.scale;
  }

  void score(const Range& range, const Panel& panel, const float* queries, float* scores) const {
    tile::multiply<tile::Left::kByRow>(range.count(), panel.columns, qk,
                                       keys + range.first * qk_width, qk_width, queries, kCols,
                                       scores, kCols, false);
  }

  void sum(const Range& range, const Panel& panel, const float* scores, State& state) const {
    tile::multiply<tile::Left::kByColumn>(v, panel.columns, range.count(),
                                          values + range.first * v_width, v_width, scores, kCols,
                                          state.sums, kCols, state.begun);
  }

  int64_t query_width, sum_lines;
};

}  // namespace

void set_forward(Table& table) {
  table.columns = kCols;
  table.forward_rows = kForwardRows;
  set_forward_of<Floats>(table.any);
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
