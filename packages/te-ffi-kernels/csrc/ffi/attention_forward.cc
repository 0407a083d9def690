// Handler of fused_attn_forward, with the operands and attributes of Transformer Engine's. It has no
// workspace among its results; `deterministic` and whether it is a training step make no difference
// but for dropout.

#include <limits>
#include <vector>

#include "ffi/attention_call.h"
#include "ffi/call.h"

namespace jaxtap::ffi {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.fused_attn_forward";

void Warm(const Attributes& attributes) {
  const AttentionConfig config(attributes);
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

void Execute(const Call& call) {
  call.NeedCounts(10, 3);
  const AttentionConfig config(call.attributes);
  const Array seed = call.Operand(5, "seed");
  const Sequences sequences(config, call.Operand(6, "q_cu_seqlens"),
                            call.Operand(7, "kv_cu_seqlens"), call.Operand(8, "q_seq_offsets"),
                            call.Operand(9, "k_seq_offsets"));
  const Array out = call.Result(0, "output"), aux = call.Result(1, "softmax_aux");
  const Array rng_state = call.Result(2, "rng_state");
  attention::Problem p =
      ReadProblem(config, call.Operand(0, "q"), call.Operand(1, "k"), call.Operand(2, "v"),
                  call.Operand(3, "bias"), call.Operand(4, "softmax_offset"), out, aux);
  ReadRandom(config, seed, p);
  p.offset = 0;
  p.segment = Sequences::At;
  p.context = &sequences;
  XlaScheduler scheduler(call);
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

const Handlers<kTarget, Warm, Execute> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
