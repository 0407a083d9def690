// Attention in bfloat16 for processors with AVX512-BF16: pairs multiplied in registers, by vdpbf16ps.

#include "attention/isa/pairs.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

using tile::Left;

// Pairs, as the tile of registers multiplies them: in the bits of floats.
struct PairProducts {
  static constexpr bool kAddsLast = false;

  JAXTAP_TILE void add(tile::Vector& sums, float factor, tile::Vector row) {
    sums = (tile::Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_ps(factor),
                                          (__m512bh)row);
  }
};

// Registers: no size is padded.
struct Registers {
  struct Scope {};
  static constexpr int64_t kStep = 1;

  static int64_t lines(int64_t size) { return size; }

  static void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a,
                       int64_t a_stride, const float* b, int64_t b_stride, float* c,
                       int64_t c_stride, bool add) {
    tile::multiply<Left::kByRow, PairProducts>(rows, columns, depth, a, a_stride, b, b_stride, c,
                                               c_stride, add);
  }

  // Rows of a block by pairs of rows, whose elements are read one by one.
  struct Columns {
    Columns(int64_t given, Scratch& scratch)
        : size(given), width(whole(size)), rows(scratch.take(kPairs * width)) {}

    void load(const Problem& p, const Tokens& tokens, const Segment& segment, int64_t kv_head,
              int64_t key, int64_t count) const {
      pair_block_rows(p, tokens, segment, kv_head, key, count, size, rows);
    }

    void multiply(const Range& range, int64_t columns, const float* right, float* sums,
                  bool add) const {
      tile::multiply<Left::kByColumn, PairProducts>(
          size, columns, pair_count(range.count()), rows + range.first / 2 * width, width, right,
          kCols, sums, kCols, add);
    }

    int64_t size, width;
    float* rows;
  };
};

struct Pairs : PairedBackward<Registers> {
  Pairs(const Problem& p, Scratch& scratch)
      : PairedBackward(p, scratch),
        rounded_scores(scratch.take(kBlock * kPanelPairs)),
        rounded_grads(scratch.take(kBlock * kPanelPairs)) {}

  // [kPanelPairs][sum_lines] and [kPanelPairs][out_lines].
  void take_rows(int64_t, BackwardState& state, Scratch& scratch) const {
    state.queries = scratch.take(kPanelPairs * sum_lines);
    state.grads = scratch.take(kPanelPairs * out_lines);
  }

  void begin(int64_t) {}
  void begin_block() {}
  void skip(int64_t) {}
  void end_block(int64_t, const KeySums&) {}

  void add(int64_t, const Range& range, const Panel& panel, int64_t from, const float* scores,
           const float* grads, const KeySums& sums, const BackwardState& state) const {
    const int64_t count = range.count(), pairs = pair_count(panel.rows);
    round_by_columns(scores, count, rounded_scores, kPanelPairs);
    round_by_columns(grads, count, rounded_grads, kPanelPairs);
    Registers::multiply(count, out_lines, pairs, rounded_scores, kPanelPairs, state.grads,
                        out_lines, sums.v + from * sums.v_width, sums.v_width, true);
    Registers::multiply(count, sum_lines, pairs, rounded_grads, kPanelPairs, state.queries,
                        sum_lines, sums.k + from * sums.k_width, sums.k_width, true);
    add_queries(range, panel, grads, state);
  }

  float *rounded_scores, *rounded_grads;
};

}  // namespace

void set_bf16(Table& table) {
  set_forward_of<PairedForward<Registers>>(table.bf16);
  set_backward_of<Pairs>(table.bf16);
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
