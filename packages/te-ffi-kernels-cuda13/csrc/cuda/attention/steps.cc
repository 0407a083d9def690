#include "cuda/attention/steps.h"

#include "common/error.h"

namespace jaxtap::cuda {
namespace {

AttentionStrides strides_of(const ffi::Lines& lines, int64_t tokens) {
  return {tokens * lines.stride, lines.size, lines.stride};
}

}  // namespace

AttentionWorkspace::AttentionWorkspace(const ffi::AttentionConfig& c, DType dtype, bool backward) {
  if (dtype != DType::BF16 && dtype != DType::F16) {
    throw invalid_argument("q must be bfloat16 or float16 on CUDA, got ", name(dtype));
  }
  if (c.bias_type == 1) {
    throw invalid_argument("bias_type is 1, before the scale, which cuDNN doesn't have");
  }
  const ffi::QkvLines lines(c);
  graph.backward = backward;
  graph.dtype = dtype;
  graph.segments = c.segments();
  graph.queries = c.q_length;
  graph.keys = c.kv_length;
  graph.q_heads = c.heads;
  graph.kv_heads = c.kv_heads;
  graph.qk_size = c.qk_size;
  graph.v_size = c.v_size;
  graph.q = strides_of(lines.q, c.q_length);
  graph.k = strides_of(lines.k, c.kv_length);
  graph.v = strides_of(lines.v, c.kv_length);
  graph.out = strides_of({0, c.heads * c.v_size, c.v_size}, c.q_length);
  graph.stats = {c.heads * c.q_length, c.is_thd() ? 1 : c.q_length, c.is_thd() ? c.heads : 1};
  graph.padded = !c.all_are_whole();
  graph.ragged = c.is_thd();
  arrays = c.packed_all() ? 1 : c.packed_keys() ? 2 : 3;
  tokens_q = c.batch * c.q_length;
  tokens_kv = c.batch * c.kv_length;
  if (graph.ragged) {
    graph.q_tokens = tokens_q;
    graph.kv_tokens = tokens_kv;
  }
  graph.left = c.left;
  graph.right = c.is_causal() ? 0 : c.right;
  // The same where all have as many keys as queries, and cuDNN has more of the other.
  graph.bottom_right = c.bottom_right && (graph.padded || c.q_length != c.kv_length);
  graph.has_bias = c.bias_type != 0;
  if (graph.has_bias) {
    graph.bias_batches = c.bias_batch;
    graph.bias_heads = c.bias_heads;
  }
  graph.has_sink = c.softmax_type != 0;
  graph.scale = c.scale;
  graph.dropout = c.dropout;
  graph.deterministic = backward && c.deterministic;
  copies_stats = backward && (graph.padded || graph.has_bias);

  const auto part = [&](bool wanted, int64_t size) { return take_part(bytes, wanted, size); };
  seed = part(graph.dropout > 0, 2 * sizeof(int64_t));
  q_lengths = part(graph.padded, graph.segments * 4);
  kv_lengths = part(graph.padded, graph.segments * 4);
  places = part(graph.ragged, 5 * (graph.segments + 1) * 8);
  stats = part(copies_stats, c.batch * c.heads * c.q_length * 4);
}

}  // namespace jaxtap::cuda
