// The gradient of a bias: that of the scores, summed over the batches and heads that share it. They
// are computed anew, so that the sums need no memory but that of some queries.

#include "attention/isa/gradient.h"
// After it, which says how multiply-adds are compiled.
#include "attention/isa/table.h"

namespace jaxtap::attention::JAXTAP_ISA_NAMESPACE {
namespace {

int64_t rounded_keys(const Problem& p) { return (p.most_keys + kBlock - 1) / kBlock * kBlock; }

int64_t scratch_of(const Problem& p) {
  const int64_t qk_width = padded(p.qk_size), v_width = padded(p.v_size);
  const int64_t widest = most(most(qk_width, v_width), kBlock);
  const int64_t blocks = kBlock * (qk_width + v_width) + kCols * widest;
  const int64_t panel = known_scratch(p) + (qk_width + v_width) * kCols;
  return blocks + 3 * kBlock * kCols + panel + rounded_keys(p) * kCols + 16 * 16;
}

void bias_grad(const Problem& p, const Gradients& gradients, int64_t batch, int64_t head,
               int64_t begin, float* memory) {
  const int64_t qk = p.qk_size, v = p.v_size, qk_width = padded(qk), v_width = padded(v);
  const int64_t group = p.q_heads / p.kv_heads;

  Scratch scratch(memory);
  float* keys = scratch.take(kBlock * qk_width);
  float* values = scratch.take(kBlock * v_width);
  float* by_query = scratch.take(kCols * most(most(qk_width, v_width), kBlock));
  float* scores = scratch.take(kBlock * kCols);
  float* grads = scratch.take(kBlock * kCols);
  float* other = scratch.take(kBlock * kCols);
  const Known known = take_known(p, scratch);
  float* queries = scratch.take(qk_width * kCols);
  float* out_grads = scratch.take(v_width * kCols);
  float* sums = scratch.take(rounded_keys(p) * kCols);
  std::memset(sums, 0, static_cast<size_t>(rounded_keys(p) * kCols) * sizeof(float));

  const int64_t end = p.bias_batches == 1 ? p.segments : batch + 1;
  for (int64_t s = batch; s < end; ++s) {
    const Segment segment = p.segment(p.context, s);
    if (begin >= segment.q_length) continue;
    const int64_t last_head = p.bias_heads == 1 ? p.q_heads : head + 1;
    for (int64_t h = head; h < last_head; ++h) {
      const Rows rows{h, 1};
      Panel panel;
      set_panel(p, segment, rows, begin, segment.q_length, panel);
      know(p, gradients, segment, rows, panel, known, queries, out_grads, by_query);
      for (int64_t key = panel.first_low / kBlock * kBlock; key <= panel.last_high; key += kBlock) {
        const Range range = seen(panel, key, least(kBlock, segment.kv_length - key));
        if (range.count() <= 0) continue;
        const int64_t from = key + range.first;
        load_block(p, p.k, segment, h / group, from, range.count(), qk, keys, qk_width);
        load_block(p, p.v, segment, h / group, from, range.count(), v, values, v_width);
        score_grads(p, segment, rows, panel, known, from, range.count(), keys, values, scores,
                    grads, by_query, other);
        float* sum = sums + from * kCols;
        for (int64_t i = 0; i < range.count(); ++i) {
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
