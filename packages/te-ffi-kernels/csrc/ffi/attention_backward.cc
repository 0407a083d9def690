// Handler of fused_attn_backward, with the operands and attributes of Transformer Engine's, without
// its workspace. The result is the same at each call, whatever `deterministic` says.

#include <vector>

#include "ffi/attention_call.h"
#include "ffi/call.h"

namespace jaxtap::ffi {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.fused_attn_backward";

void Warm(const Attributes& attributes) {
  const AttentionConfig config(attributes);
  // One query, one key, of the sizes of the heads; which dtype they will have, it isn't told.
  std::vector<float> q(static_cast<size_t>(config.qk_size)), v(static_cast<size_t>(config.v_size));
  std::vector<float> q_grad(q.size()), k_grad(q.size()), v_grad(v.size());
  float aux = 0;
  attention::Problem p;
  p.segments = p.most_queries = p.most_keys = p.q_heads = p.kv_heads = 1;
  p.segment = [](const void*, int64_t) {
    attention::Segment segment;
    segment.q_length = segment.kv_length = 1;
    return segment;
  };
  p.qk_size = config.qk_size;
  p.v_size = config.v_size;
  p.q = p.k = {q.data(), config.qk_size, config.qk_size};
  p.v = p.out = {v.data(), config.v_size, config.v_size};
  p.aux = &aux;
  attention::Gradients gradients;
  gradients.out_grad = p.v;
  gradients.q_grad = {q_grad.data(), config.qk_size, config.qk_size};
  gradients.k_grad = {k_grad.data(), config.qk_size, config.qk_size};
  gradients.v_grad = {v_grad.data(), config.v_size, config.v_size};
  for (DType dtype : {DType::F32, DType::BF16}) {
    p.dtype = dtype;
    attention::backward(p, gradients, Parallel());
  }
}

void Execute(const Call& call) {
  call.NeedCounts(13, 5);
  const AttentionConfig config(call.attributes);
  const Sequences sequences(config, call.Operand(9, "q_cu_seqlens"),
                            call.Operand(10, "kv_cu_seqlens"), call.Operand(11, "q_seq_offsets"),
                            call.Operand(12, "k_seq_offsets"));
  attention::Problem p =
      ReadProblem(config, call.Operand(0, "q"), call.Operand(1, "k"), call.Operand(2, "v"),
                  call.Operand(3, "bias"), call.Operand(4, "softmax_offset"),
                  call.Operand(7, "output"), call.Operand(5, "softmax_aux"));
  ReadRandom(config, call.Operand(6, "rng_state"), p);
  const Array out_grad = call.Operand(8, "doutput");
  const GradientArrays results = {call.Result(0, "dq"), call.Result(1, "dk"), call.Result(2, "dv"),
                                  call.Result(3, "dbias"), call.Result(4, "dsoftmax_offset")};
  p.segment = Sequences::At;
  p.context = &sequences;
  const attention::Gradients gradients = ReadGradients(config, p, out_grad, results);
  XlaScheduler scheduler(call);
  const Parallel parallel(scheduler);
  if (!sequences.are_whole()) {
    for (const Array* array : {&results.q, &results.k, &results.v}) FillZero(*array, parallel);
  }
  attention::backward(p, gradients, parallel);
}

const Handlers<kTarget, Warm, Execute> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
