// Handlers of fused_attn_forward and fused_attn_backward: cuDNN's attention, planned by `prepare`.

#include "cuda/attention/plan.h"

#include "cuda/handlers/attention.h"
#include "cuda/handlers/planned.h"
#include "ffi/attention_call.h"

namespace jaxtap::cuda {

DnnPlans& AttentionPlans() {
  static auto* plans = new DnnPlans;  // as long as the process: the library may be gone then
  return *plans;
}

namespace {

// All but what is done with the workspace.
AttentionMemory MemoryOf(const attention::Problem& p, const ffi::SequenceArrays& sequences,
                         const Array& workspace) {
  AttentionMemory m;
  m.q = p.q.data;
  m.k = p.k.data;
  m.v = p.v.data;
  m.out = p.out.data;
  m.stats = p.aux;
  m.bias = const_cast<void*>(p.bias);
  m.sink = const_cast<float*>(p.sink);
  m.q_cumulative = sequences.q_cu;
  m.kv_cumulative = sequences.kv_cu;
  m.q_at = sequences.q_at;
  m.kv_at = sequences.kv_at;
  m.workspace = workspace.data;
  m.bytes = static_cast<size_t>(workspace.size());
  return m;
}

struct Planned : PerDevice {
  explicit Planned(AttentionPlan plan) : plan(std::move(plan)) {}
  AttentionPlan plan;
};

template <class Op>
std::unique_ptr<Planned> Make(const Op& given, const Call& call, int device) {
  constexpr bool kIsBackward = std::is_same_v<Op, ffi::AttentionBackwardCall>;
  const ffi::AttentionConfig& c = given.config;
  if (c.batch * c.q_length * c.kv_length == 0) {
    throw invalid_argument("q is ", call.Operand(0, "q").Text(), ": nothing sees anything");
  }
  const AttentionWorkspace steps(c, given.problem.dtype, kIsBackward);
  const DnnPlans::Entry& entry = AttentionPlans().of(cudnn(), runtime(), device, steps.graph);
  return std::make_unique<Planned>(AttentionPlan(cudnn(), runtime(), entry, steps,
                                                 static_cast<size_t>(call.Memory().size())));
}

void Forward(const ffi::AttentionForwardCall& given, const Call& call, Planned& planned) {
  AttentionMemory m = MemoryOf(given.problem, given.sequences, call.Memory());
  m.random = static_cast<const uint32_t*>(given.seed.data);
  m.words = given.seed.size();
  m.state = static_cast<uint32_t*>(given.state.data);
  m.state_words = given.state.size();
  planned.plan.run(m, call.stream);
}

void Backward(const ffi::AttentionBackwardCall& given, const Call& call, Planned& planned) {
  const attention::Gradients& gradients = given.gradients;
  AttentionMemory m = MemoryOf(given.problem, given.sequences, call.Memory());
  m.random = given.random;
  m.words = given.random == nullptr ? 0 : given.state.size();
  m.out_grad = gradients.out_grad.data;
  m.q_grad = gradients.q_grad.data;
  m.k_grad = gradients.k_grad.data;
  m.v_grad = gradients.v_grad.data;
  m.bias_grad = gradients.bias_grad;
  m.sink_grad = gradients.sink_grad;
  planned.plan.run(m, call.stream);
}

template <class Op, void (*kRun)(const Op&, const Call&, Planned&)>
using Attention = PlannedHandlers<Op, Planned, Make<Op>, kRun>;

const Attention<ffi::AttentionForwardCall, Forward> kForward;
const Attention<ffi::AttentionBackwardCall, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::cuda
