// Handler of fused_attn_backward, with the operands and attributes of Transformer Engine's, without
// its workspace. The result is the same at each call, whatever `deterministic` says.

#include <vector>

#include "ffi/attention_call.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/threads.h"

namespace jaxtap::ffi {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.fused_attn_backward";

void Warm(const AttentionConfig& config) {
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

void Execute(const AttentionConfig& config, xffi::ThreadPool pool, attention::Problem& p,
             const Sequences& sequences, const Array& out_grad, const GradientArrays& results) {
  p.segment = Sequences::At;
  p.context = &sequences;
  const attention::Gradients gradients = ReadGradients(config, p, out_grad, results);
  XlaScheduler scheduler(pool);
  const Parallel parallel(scheduler);
  if (!sequences.are_whole()) {
    for (const Array* array : {&results.q, &results.k, &results.v}) FillZero(*array, parallel);
  }
  attention::backward(p, gradients, parallel);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kTarget, [&] { Warm(AttentionConfig(attributes)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer q, xffi::AnyBuffer k, xffi::AnyBuffer v,
       xffi::AnyBuffer bias, xffi::AnyBuffer softmax_offset, xffi::AnyBuffer softmax_aux,
       xffi::AnyBuffer rng_state, xffi::AnyBuffer output, xffi::AnyBuffer doutput,
       xffi::AnyBuffer q_cu_seqlens, xffi::AnyBuffer kv_cu_seqlens, xffi::AnyBuffer q_seq_offsets,
       xffi::AnyBuffer k_seq_offsets, xffi::Result<xffi::AnyBuffer> dq,
       xffi::Result<xffi::AnyBuffer> dk, xffi::Result<xffi::AnyBuffer> dv,
       xffi::Result<xffi::AnyBuffer> dbias, xffi::Result<xffi::AnyBuffer> dsoftmax_offset,
       xffi::Dictionary attributes) {
      return Guarded(kTarget, [&] {
        const AttentionConfig config(attributes);
        const Sequences sequences(
            config, Read("q_cu_seqlens", q_cu_seqlens), Read("kv_cu_seqlens", kv_cu_seqlens),
            Read("q_seq_offsets", q_seq_offsets), Read("k_seq_offsets", k_seq_offsets));
        attention::Problem problem =
            ReadProblem(config, Read("q", q), Read("k", k), Read("v", v), Read("bias", bias),
                        Read("softmax_offset", softmax_offset), Read("output", output),
                        Read("softmax_aux", softmax_aux));
        ReadRandom(config, Read("rng_state", rng_state), problem);
        Execute(config, pool, problem, sequences, Read("doutput", doutput),
                {Read("dq", dq), Read("dk", dk), Read("dv", dv), Read("dbias", dbias),
                 Read("dsoftmax_offset", dsoftmax_offset)});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // q
        .Arg<xffi::AnyBuffer>()  // k
        .Arg<xffi::AnyBuffer>()  // v
        .Arg<xffi::AnyBuffer>()  // bias
        .Arg<xffi::AnyBuffer>()  // softmax_offset
        .Arg<xffi::AnyBuffer>()  // softmax_aux
        .Arg<xffi::AnyBuffer>()  // rng_state
        .Arg<xffi::AnyBuffer>()  // output
        .Arg<xffi::AnyBuffer>()  // doutput
        .Arg<xffi::AnyBuffer>()  // q_cu_seqlens
        .Arg<xffi::AnyBuffer>()  // kv_cu_seqlens
        .Arg<xffi::AnyBuffer>()  // q_seq_offsets
        .Arg<xffi::AnyBuffer>()  // k_seq_offsets
        .Ret<xffi::AnyBuffer>()  // dq
        .Ret<xffi::AnyBuffer>()  // dk
        .Ret<xffi::AnyBuffer>()  // dv
        .Ret<xffi::AnyBuffer>()  // dbias
        .Ret<xffi::AnyBuffer>()  // dsoftmax_offset
        .Attrs());

const Registration kRegistration({kTarget, kInstantiate, kExecute});

}  // namespace
}  // namespace jaxtap::ffi
