// What calls of fused_attn_forward and fused_attn_backward are given, checked, whatever platform
// they run on. The operands and attributes are those of Transformer Engine's; a workspace among the
// results is the platform's.

#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "ffi/attention_config.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

inline void NeedCount(const Array& array, int64_t size) {
  if (array.size() != size) {
    throw invalid_argument(array.name, " must have ", size, " numbers, as the attributes have it, "
                           "got ", array.Text());
  }
}

// The arrays that say where sequences are: operands from `at` on.
struct SequenceArrays {
  template <class Call>
  SequenceArrays(const AttentionConfig& config, const Call& call, int64_t at) {
    const int64_t segments = config.segments();
    const Array q_sums = call.Operand(at, "q_cu_seqlens");
    const Array kv_sums = call.Operand(at + 1, "kv_cu_seqlens");
    const Array q_offsets = call.Operand(at + 2, "q_seq_offsets");
    const Array kv_offsets = call.Operand(at + 3, "k_seq_offsets");
    q_cu = Numbers(q_sums, segments + 1);
    kv_cu = Numbers(kv_sums, segments + 1);
    if (!config.is_thd()) return;
    q_at = Numbers(q_offsets, segments);
    kv_at = Numbers(kv_offsets, segments);
  }

  const int32_t *q_cu, *kv_cu;
  const int32_t *q_at = nullptr, *kv_at = nullptr;

 private:
  static const int32_t* Numbers(const Array& array, int64_t least) {
    array.NeedDtype({DType::S32});
    if (array.size() < least) {
      throw invalid_argument(array.name, " must have at least ", least, " numbers, got ",
                             array.Text());
    }
    return static_cast<const int32_t*>(array.data);
  }
};

// Three arrays, or parts of the first or the second, with the tokens of q, k and v.
struct QkvTokens {
  attention::Tokens q, k, v;
};

inline QkvTokens ReadQkv(const AttentionConfig& c, const Array& q, const Array& k, const Array& v) {
  const QkvLines lines(c);
  const auto part = [](const Array& array, const Lines& line) {
    char* data = static_cast<char*>(array.data) +
                 line.begin * static_cast<int64_t>(byte_size(array.dtype));
    return attention::Tokens{data, line.stride, line.size};
  };
  q.NeedDtype({DType::F32, DType::BF16, DType::F16});
  NeedCount(q, c.batch * c.q_length * lines.q.stride);
  if (c.packed_all()) return {part(q, lines.q), part(q, lines.k), part(q, lines.v)};
  k.NeedDtype({q.dtype});
  if (!c.packed_keys()) v.NeedDtype({q.dtype});
  NeedCount(k, c.batch * c.kv_length * lines.k.stride);
  if (c.packed_keys()) return {part(q, lines.q), part(k, lines.k), part(k, lines.v)};
  NeedCount(v, c.batch * c.kv_length * lines.v.stride);
  return {part(q, lines.q), part(k, lines.k), part(v, lines.v)};
}

// All of a call but its lengths and random numbers: addresses may be a GPU's.
template <class Call>
attention::Problem ReadProblem(const AttentionConfig& c, const Call& call, const Array& out,
                               const Array& aux) {
  const Array q = call.Operand(0, "q"), k = call.Operand(1, "k"), v = call.Operand(2, "v");
  const Array bias = call.Operand(3, "bias"), sink = call.Operand(4, "softmax_offset");
  attention::Problem p;
  const QkvTokens tokens = ReadQkv(c, q, k, v);
  p.dtype = q.dtype;
  p.segments = c.segments();
  p.most_queries = c.q_length;
  p.most_keys = c.kv_length;
  p.q_heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.qk_size = c.qk_size;
  p.v_size = c.v_size;
  p.q = tokens.q;
  p.k = tokens.k;
  p.v = tokens.v;
  NeedCount(out.NeedDtype({q.dtype}), c.batch * c.q_length * c.heads * c.v_size);
  p.out = {out.data, c.heads * c.v_size, c.v_size};
  p.scale = c.scale;
  p.bias_type = static_cast<attention::Bias>(c.bias_type);
  if (c.bias_type != 0) {
    NeedCount(bias.NeedDtype({q.dtype}), c.bias_batch * c.bias_heads * c.q_length * c.kv_length);
    p.bias = bias.data;
    p.bias_batches = c.bias_batch;
    p.bias_heads = c.bias_heads;
  }
  p.left = c.left;
  p.right = c.right;
  if (c.is_causal()) p.right = 0;
  p.bottom_right = c.bottom_right;
  if (c.softmax_type != 0) {
    NeedCount(sink.NeedDtype({DType::F32}), c.heads);
    p.sink = static_cast<const float*>(sink.data);
  }
  NeedCount(aux.NeedDtype({DType::F32}), c.batch * c.heads * c.q_length);
  p.aux = static_cast<float*>(aux.data);
  p.aux_token_stride = c.is_thd() ? c.heads : 1;
  p.aux_head_stride = c.is_thd() ? 1 : c.q_length;
  p.dropout = c.dropout;
  return p;
}

// The seed and, if there are more numbers, the offset.
inline const uint32_t* RandomWords(const AttentionConfig& c, const Array& random) {
  if (!(c.dropout > 0)) return nullptr;
  random.NeedDtype({DType::U32});
  if (random.size() < 2) {
    throw invalid_argument(random.name, " must have two numbers, got ", random.Text());
  }
  return static_cast<const uint32_t*>(random.data);
}

// The results of backward.
struct GradientArrays {
  Array q, k, v, bias, sink;
};

inline attention::Gradients ReadGradients(const AttentionConfig& c, const attention::Problem& p,
                                          const Array& out_grad, const GradientArrays& results) {
  attention::Gradients gradients;
  NeedCount(out_grad.NeedDtype({p.dtype}), c.batch * c.q_length * c.heads * c.v_size);
  gradients.out_grad = {out_grad.data, p.out.token_stride, p.out.head_stride};
  results.q.NeedDtype({p.dtype});
  const QkvTokens tokens = ReadQkv(c, results.q, results.k, results.v);
  gradients.q_grad = tokens.q;
  gradients.k_grad = tokens.k;
  gradients.v_grad = tokens.v;
  if (c.bias_type != 0) {
    NeedCount(results.bias.NeedDtype({p.dtype}),
              c.bias_batch * c.bias_heads * c.q_length * c.kv_length);
    gradients.bias_grad = results.bias.data;
  }
  if (c.softmax_type != 0) {
    NeedCount(results.sink.NeedDtype({DType::F32}), c.heads);
    gradients.sink_grad = static_cast<float*>(results.sink.data);
  }
  return gradients;
}

struct AttentionForwardCall {
  static constexpr char kTarget[] = "te_ffi_kernels.fused_attn_forward";
  using Config = AttentionConfig;

  template <class Call>
  explicit AttentionForwardCall(const Call& call)
      : config(ConfigOf<Config>(call, 10, 3)),
        seed(call.Operand(5, "seed")),
        out(call.Result(0, "output")),
        aux(call.Result(1, "softmax_aux")),
        state(call.Result(2, "rng_state")),
        sequences(config, call, 6),
        problem(ReadProblem(config, call, out, aux)),
        random(RandomWords(config, seed)) {
    seed.NeedDtype({DType::U32});
    state.NeedDtype({DType::U32});
  }

  Config config;
  Array seed, out, aux, state;
  SequenceArrays sequences;
  attention::Problem problem;
  const uint32_t* random;  // nullptr without dropout
};

struct AttentionBackwardCall {
  static constexpr char kTarget[] = "te_ffi_kernels.fused_attn_backward";
  using Config = AttentionConfig;

  template <class Call>
  explicit AttentionBackwardCall(const Call& call)
      : config(ConfigOf<Config>(call, 13, 5)),
        state(call.Operand(6, "rng_state")),
        results{call.Result(0, "dq"), call.Result(1, "dk"), call.Result(2, "dv"),
                call.Result(3, "dbias"), call.Result(4, "dsoftmax_offset")},
        sequences(config, call, 9),
        problem(ReadProblem(config, call, call.Operand(7, "output"),
                            call.Operand(5, "softmax_aux"))),
        gradients(ReadGradients(config, problem, call.Operand(8, "doutput"), results)),
        random(RandomWords(config, state)) {}

  Config config;
  Array state;
  GradientArrays results;
  SequenceArrays sequences;
  attention::Problem problem;
  attention::Gradients gradients;
  const uint32_t* random;  // nullptr without dropout
};

}  // namespace jaxtap::ffi
