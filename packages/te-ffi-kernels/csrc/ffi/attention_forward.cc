// Handler of fused_attn_forward, with the operands and attributes of Transformer Engine's. It has no
// workspace among its results; `deterministic` and whether it is a training step make no difference
// but for dropout.

#include <limits>
#include <vector>

#include "ffi/attention_call.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/threads.h"

namespace jaxtap::ffi {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.fused_attn_forward";

void Warm(const AttentionConfig& config) {
  // One query, one key, of the sizes of the heads; which dtype they will have, it isn't told.
  std::vector<float> q(static_cast<size_t>(config.qk_size)), v(static_cast<size_t>(config.v_size));
  std::vector<float> out(v.size());
  float aux;
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
  p.v = {v.data(), config.v_size, config.v_size};
  p.out = {out.data(), config.v_size, config.v_size};
  p.aux = &aux;
  for (DType dtype : {DType::F32, DType::BF16}) {
    p.dtype = dtype;
    attention::forward(p, Parallel());
  }
}

void Execute(const AttentionConfig& config, xffi::ThreadPool pool, const Array& q, const Array& k,
             const Array& v, const Array& bias, const Array& sink, const Array& seed,
             const Sequences& sequences, const Array& out, const Array& aux,
             const Array& rng_state) {
  attention::Problem p = ReadProblem(config, q, k, v, bias, sink, out, aux);
  ReadRandom(config, seed, p);
  p.offset = 0;
  p.segment = Sequences::At;
  p.context = &sequences;
  XlaScheduler scheduler(pool);
  const Parallel parallel(scheduler);
  if (!sequences.are_whole()) {
    FillZero(out, parallel);
    Fill<float>(aux, -std::numeric_limits<float>::infinity(), parallel);
  }
  attention::forward(p, parallel);
  rng_state.NeedDtype({DType::U32});
  Fill<uint32_t>(rng_state, 0, Parallel());
  seed.NeedDtype({DType::U32});
  for (int64_t i = 0; i < std::min<int64_t>({2, seed.size(), rng_state.size()}); ++i) {
    static_cast<uint32_t*>(rng_state.data)[i] = static_cast<const uint32_t*>(seed.data)[i];
  }
}

XLA_FFI_DEFINE_HANDLER(kInstantiate,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kTarget, [&] { Warm(AttentionConfig(attributes)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer q, xffi::AnyBuffer k, xffi::AnyBuffer v,
       xffi::AnyBuffer bias, xffi::AnyBuffer softmax_offset, xffi::AnyBuffer seed,
       xffi::AnyBuffer q_cu_seqlens, xffi::AnyBuffer kv_cu_seqlens, xffi::AnyBuffer q_seq_offsets,
       xffi::AnyBuffer k_seq_offsets, xffi::Result<xffi::AnyBuffer> output,
       xffi::Result<xffi::AnyBuffer> softmax_aux, xffi::Result<xffi::AnyBuffer> rng_state,
       xffi::Dictionary attributes) {
      return Guarded(kTarget, [&] {
        const AttentionConfig config(attributes);
        const Sequences sequences(
            config, Read("q_cu_seqlens", q_cu_seqlens), Read("kv_cu_seqlens", kv_cu_seqlens),
            Read("q_seq_offsets", q_seq_offsets), Read("k_seq_offsets", k_seq_offsets));
        Execute(config, pool, Read("q", q), Read("k", k), Read("v", v), Read("bias", bias),
                Read("softmax_offset", softmax_offset), Read("seed", seed), sequences,
                Read("output", output), Read("softmax_aux", softmax_aux),
                Read("rng_state", rng_state));
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // q
        .Arg<xffi::AnyBuffer>()  // k
        .Arg<xffi::AnyBuffer>()  // v
        .Arg<xffi::AnyBuffer>()  // bias
        .Arg<xffi::AnyBuffer>()  // softmax_offset
        .Arg<xffi::AnyBuffer>()  // seed
        .Arg<xffi::AnyBuffer>()  // q_cu_seqlens
        .Arg<xffi::AnyBuffer>()  // kv_cu_seqlens
        .Arg<xffi::AnyBuffer>()  // q_seq_offsets
        .Arg<xffi::AnyBuffer>()  // k_seq_offsets
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // softmax_aux
        .Ret<xffi::AnyBuffer>()  // rng_state
        .Attrs());

const Registration kRegistration({kTarget, kInstantiate, kExecute});

}  // namespace
}  // namespace jaxtap::ffi
