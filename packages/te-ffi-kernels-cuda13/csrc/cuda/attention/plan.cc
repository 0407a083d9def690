#include "cuda/attention/plan.h"

#include <cstdint>
#include <utility>

#include "common/error.h"
#include "cuda/kernels/attention.h"

namespace jaxtap::cuda {
namespace {

using Which = AttentionArray;

constexpr uintptr_t kAlignment = 16;  // of what cuDNN reads and writes; XLA aligns to this at least
constexpr int64_t kPair = 2;          // numbers of 16 bits in a word

void need(size_t found, size_t needed) {
  if (found >= needed) return;
  throw invalid_argument("workspace must have ", needed, " bytes, got ", found,
                         ". Call te_ffi_kernels.fused_attn, which knows the size.");
}

AttentionSide side(const int32_t* cumulative, const int32_t* at, int64_t most, int64_t tokens) {
  AttentionSide found;
  found.cumulative = cumulative;
  found.at = at;
  found.most = most;
  found.tokens = tokens;
  return found;
}

}  // namespace

AttentionPlan::AttentionPlan(Cudnn& dnn, Runtime& cuda, const DnnPlans::Entry& entry,
                             const AttentionWorkspace& steps, size_t workspace)
    : dnn_(dnn), cuda_(cuda), entry_(entry), steps_(steps) {
  if (entry_.plan.get() == nullptr) {
    throw failed_precondition("cuDNN doesn't have this attention: ", entry_.why);
  }
  need(workspace, kWorkspaceAlignment + steps_.bytes + entry_.workspace);
}

AttentionArrays AttentionPlan::arrays(const AttentionMemory& m, char* workspace) const {
  const AttentionGraph& g = steps_.graph;
  AttentionArrays a;
  a[Which::kQ] = m.q;
  a[Which::kK] = m.k;
  a[Which::kV] = m.v;
  a[Which::kOut] = m.out;
  a[Which::kStats] = steps_.copies_stats ? workspace + steps_.stats : static_cast<void*>(m.stats);
  if (g.has_bias) a[Which::kBias] = m.bias;
  if (g.has_sink) a[Which::kSink] = m.sink;
  if (g.padded) {
    a[Which::kQLengths] = workspace + steps_.q_lengths;
    a[Which::kKvLengths] = workspace + steps_.kv_lengths;
  }
  if (g.ragged) {
    auto* places = reinterpret_cast<int64_t*>(workspace + steps_.places);
    for (Which which : {Which::kQAt, Which::kKAt, Which::kVAt, Which::kOutAt, Which::kStatsAt}) {
      a[which] = places;
      places += g.segments + 1;
    }
  }
  if (g.dropout > 0) {
    a[Which::kSeed] = workspace + steps_.seed;
    a[Which::kOffset] = workspace + steps_.seed + sizeof(int64_t);
  }
  if (g.backward) {
    a[Which::kOutGrad] = m.out_grad;
    a[Which::kQGrad] = m.q_grad;
    a[Which::kKGrad] = m.k_grad;
    a[Which::kVGrad] = m.v_grad;
    if (g.has_bias) a[Which::kBiasGrad] = m.bias_grad;
    if (g.has_sink) a[Which::kSinkGrad] = m.sink_grad;
  }
  // Of numbers; cuDNN reads these in vectors, and doesn't look.
  for (Which which : {Which::kQ, Which::kK, Which::kV, Which::kOut, Which::kBias, Which::kOutGrad,
                      Which::kQGrad, Which::kKGrad, Which::kVGrad, Which::kBiasGrad}) {
    if (reinterpret_cast<uintptr_t>(a[which]) % kAlignment != 0) {
      throw invalid_argument("an operand's address isn't a multiple of ", kAlignment);
    }
  }
  return a;
}

void AttentionPlan::prepare(const AttentionMemory& m, char* workspace, Stream stream) const {
  const AttentionGraph& g = steps_.graph;
  AttentionSegments args;
  args.segments = g.segments;
  args.q = side(m.q_cumulative, m.q_at, g.queries, steps_.tokens_q);
  args.kv = side(m.kv_cumulative, m.kv_at, g.keys, steps_.tokens_kv);
  if (g.padded) {
    args.q_lengths = reinterpret_cast<int32_t*>(workspace + steps_.q_lengths);
    args.kv_lengths = reinterpret_cast<int32_t*>(workspace + steps_.kv_lengths);
  }
  if (g.ragged) {
    args.places = reinterpret_cast<int64_t*>(workspace + steps_.places);
    int i = 0;
    for (const AttentionStrides* one : {&g.q, &g.k, &g.v, &g.out, &g.stats}) {
      args.strides[i++] = one->token;
    }
  }
  if (g.dropout > 0) args.seed = reinterpret_cast<int64_t*>(workspace + steps_.seed);
  args.random = m.random;
  args.words = m.words;
  args.state = m.state;
  args.state_words = m.state_words;
  if (g.padded || g.dropout > 0 || m.state_words != 0) attention_segments(args, stream);

  const auto clear = [&](void* memory, int64_t size) { set_zero(memory, size, stream, cuda_); };
  const int64_t stats = steps_.tokens_q * g.q_heads;
  const auto bytes = static_cast<int64_t>(byte_size(g.dtype));
  if (!g.backward) {
    // Tokens of no segment: cuDNN doesn't write there.
    if (g.ragged) {
      clear(m.out, steps_.tokens_q * g.out.token * bytes);
      attention_none({m.stats, stats}, stream);
    }
    return;
  }
  if (steps_.copies_stats) {
    attention_stats({m.stats, reinterpret_cast<float*>(workspace + steps_.stats), stats}, stream);
  }
  if (g.ragged) {
    clear(m.q_grad, steps_.tokens_q * g.q.token * bytes);
    if (steps_.arrays > 1) clear(m.k_grad, steps_.tokens_kv * g.k.token * bytes);
    if (steps_.arrays > 2) clear(m.v_grad, steps_.tokens_kv * g.v.token * bytes);
  }
  // Sums, and what masks hide of a bias.
  if (g.has_bias) {
    clear(m.bias_grad, g.bias_batches * g.bias_heads * g.queries * g.keys * bytes);
  }
  if (g.has_sink) clear(m.sink_grad, g.q_heads * static_cast<int64_t>(sizeof(float)));
}

// Where lengths leave a token nothing to see, results are zero, whatever cuDNN left there.
void AttentionPlan::finish(const AttentionMemory& m, Stream stream) const {
  const AttentionGraph& g = steps_.graph;
  if (!g.padded) return;
  AttentionClear args;
  args.segments = g.segments;
  args.bottom_right = g.bottom_right;
  const auto clear = [&](void* data, int64_t token, int64_t width) {
    args.data = static_cast<uint32_t*>(data);
    args.stride = token / kPair;
    args.width = width / kPair;
    attention_clear(args, stream);
  };
  args.own = side(m.q_cumulative, m.q_at, g.queries, steps_.tokens_q);
  args.other = side(m.kv_cumulative, m.kv_at, g.keys, steps_.tokens_kv);
  args.left = g.left;
  args.right = g.right;
  if (!g.backward) {
    args.stats = m.stats;
    args.heads = g.q_heads;
    args.stats_segment = g.stats.segment;
    args.stats_head = g.stats.head;
    args.stats_token = g.stats.token;
    args.sink = g.has_sink ? m.sink : nullptr;
    clear(m.out, g.out.token, g.q_heads * g.v_size);
    return;
  }
  clear(m.q_grad, g.q.token, g.q_heads * g.qk_size);
  // A key is seen from the other side.
  std::swap(args.own, args.other);
  std::swap(args.left, args.right);
  clear(m.k_grad, g.k.token, g.kv_heads * g.qk_size);
  clear(m.v_grad, g.v.token, g.kv_heads * g.v_size);
}

void AttentionPlan::run(const AttentionMemory& memory, Stream stream) const {
  need(memory.bytes, kWorkspaceAlignment + steps_.bytes + entry_.workspace);
  char* workspace = align_workspace(memory.workspace);
  const AttentionArrays given = arrays(memory, workspace);
  prepare(memory, workspace, stream);
  {
    std::lock_guard<std::mutex> hold(entry_.running);
    check_run(dnn_, dnn_.set_stream(entry_.handle.get(), stream), "giving cuDNN a stream", cuda_);
    const int status =
        dnn_.execute(entry_.handle.get(), entry_.plan.get(), given, workspace + steps_.bytes);
    check_run(dnn_, status, "attention", cuda_);
  }
  finish(memory, stream);
}

}  // namespace jaxtap::cuda
