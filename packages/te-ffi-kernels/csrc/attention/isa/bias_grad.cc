// The gradient of a bias: that of the scores, summed over the batches and heads that share it. They
// are computed anew, so that the sums need no memory but that of some queries.

#include "attention/isa/gradient.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

int64_t rounded_keys(const Problem& p) { return (p.most_keys + kBlock - 1) / kBlock * kBlock; }

struct BiasGradMemory {
  BiasGradMemory(const Problem& p, Scratch& scratch)
      : block(p, scratch),
        by_query(scratch.take(kCols * most(most(block.qk_width, block.v_width), kBlock))),
        scores(scratch.take(kBlock * kCols)),
        grads(scratch.take(kBlock * kCols)),
        other(scratch.take(kBlock * kCols)),
        known(take_known(block.qk_width, block.v_width, scratch)),
        queries(scratch.take(block.qk_width * kCols)),
        out_grads(scratch.take(block.v_width * kCols)),
        sums(scratch.take(rounded_keys(p) * kCols)) {}

  FloatBlock block;
  float *by_query, *scores, *grads, *other;
  Known known;
  float *queries, *out_grads, *sums;
};

int64_t scratch_of(const Problem& p) {
  Scratch counted(nullptr);
  const BiasGradMemory memory(p, counted);
  return counted.taken();
}

void bias_grad(const Problem& p, const Gradients& gradients, int64_t batch, int64_t head,
               int64_t begin, float* data) {
  const int64_t group = p.q_heads / p.kv_heads;
  Scratch scratch(data);
  const BiasGradMemory memory(p, scratch);
  float *by_query = memory.by_query, *scores = memory.scores, *grads = memory.grads;
  float *other = memory.other, *sums = memory.sums;
  zero(sums, rounded_keys(p) * kCols);

  const int64_t end = p.bias_batches == 1 ? p.segments : batch + 1;
  for (int64_t s = batch; s < end; ++s) {
    const Segment segment = p.segment(p.context, s);
    if (begin >= segment.q_length) continue;
    const int64_t last_head = p.bias_heads == 1 ? p.q_heads : head + 1;
    for (int64_t h = head; h < last_head; ++h) {
      const Rows rows{h, 1};
      Panel panel;
      set_panel(p, segment, rows, begin, segment.q_length, panel);
      know_floats(p, gradients, segment, rows, panel, memory.known, memory.queries,
                  memory.out_grads, by_query);
      for (int64_t key = panel.first_low / kBlock * kBlock; key <= panel.last_high; key += kBlock) {
        const Range range = seen<1>(panel, key, least(kBlock, segment.kv_length - key));
        const int64_t count = range.count(), from = key + range.first;
        if (count <= 0) continue;
        memory.block.load(p, segment, h / group, from, count);
        score_floats(memory.block, {0, count}, panel, memory.known, scores, grads);
        add_bias(p, segment, rows, panel, from, count, scores, by_query, other);
        differentiate(p, segment, rows, panel, memory.known, from, count, scores, grads, other);
        float* sum = sums + from * kCols;
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t c = 0; c < panel.columns; c += kWidth) {
            write(sum + i * kCols + c, read(sum + i * kCols + c) + read(grads + i * kCols + c));
          }
        }
      }
    }
  }

  const float factor = p.bias_type == Bias::kPreScale ? p.scale : 1.0f;
  for (int64_t i = 0; i < rounded_keys(p) * kCols; ++i) sums[i] *= factor;
  const int64_t lines = least(kCols, p.most_queries - begin);
  const int64_t line = (batch * p.bias_heads + head) * p.most_queries + begin;
  for (int64_t key = 0; key < p.most_keys; key += kBlock) {
    transpose(sums + key * kCols, kCols, kBlock, kCols, by_query, kBlock);
    for (int64_t r = 0; r < lines; ++r) {
      store_numbers(p.dtype, by_query + r * kBlock, least(kBlock, p.most_keys - key),
                    at(gradients.bias_grad, p.dtype, (line + r) * p.most_keys + key));
    }
  }
}

}  // namespace

void set_bias_grad(Table& table) {
  table.bias_grad_scratch = scratch_of;
  table.bias_grad = bias_grad;
}

}  // namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE
