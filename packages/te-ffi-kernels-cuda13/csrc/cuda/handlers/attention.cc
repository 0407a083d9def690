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

constexpr char kForward[] = "te_ffi_kernels.fused_attn_forward";
constexpr char kBackward[] = "te_ffi_kernels.fused_attn_backward";

// What a call is given: read, and checked.
struct Given {
  ffi::AttentionConfig config;
  DType dtype;
  AttentionMemory memory;
};

void TakeProblem(Given& given, const attention::Problem& p) {
  AttentionMemory& m = given.memory;
  given.dtype = p.dtype;
  m.q = p.q.data;
  m.k = p.k.data;
  m.v = p.v.data;
  m.out = p.out.data;
  m.stats = p.aux;
  m.bias = const_cast<void*>(p.bias);
  m.sink = const_cast<float*>(p.sink);
}

void TakeSequences(Given& given, const ffi::SequenceArrays& sequences) {
  given.memory.q_cumulative = sequences.q_cu;
  given.memory.kv_cumulative = sequences.kv_cu;
  given.memory.q_at = sequences.q_at;
  given.memory.kv_at = sequences.kv_at;
}

void TakeWorkspace(Given& given, const Array& workspace) {
  workspace.NeedDtype({DType::U8});
  given.memory.workspace = workspace.data;
  given.memory.bytes = static_cast<size_t>(workspace.size());
}

Given ReadForward(const Call& call) {
  call.NeedCounts(10, 4);
  Given given{ffi::AttentionConfig(call.attributes), DType::F32, {}};
  TakeProblem(given, ffi::ReadProblem(given.config, call.Operand(0, "q"), call.Operand(1, "k"),
                                      call.Operand(2, "v"), call.Operand(3, "bias"),
                                      call.Operand(4, "softmax_offset"), call.Result(0, "output"),
                                      call.Result(1, "softmax_aux")));
  TakeSequences(given, {given.config, call.Operand(6, "q_cu_seqlens"),
                        call.Operand(7, "kv_cu_seqlens"), call.Operand(8, "q_seq_offsets"),
                        call.Operand(9, "k_seq_offsets")});
  const Array seed = call.Operand(5, "seed"), state = call.Result(2, "rng_state");
  ffi::RandomWords(given.config, seed);
  given.memory.random =
      static_cast<const uint32_t*>(seed.NeedDtype({DType::U32}).data);
  given.memory.words = seed.size();
  given.memory.state = static_cast<uint32_t*>(state.NeedDtype({DType::U32}).data);
  given.memory.state_words = state.size();
  TakeWorkspace(given, call.Result(3, "workspace"));
  return given;
}

Given ReadBackward(const Call& call) {
  call.NeedCounts(13, 6);
  Given given{ffi::AttentionConfig(call.attributes), DType::F32, {}};
  const attention::Problem p = ffi::ReadProblem(
      given.config, call.Operand(0, "q"), call.Operand(1, "k"), call.Operand(2, "v"),
      call.Operand(3, "bias"), call.Operand(4, "softmax_offset"), call.Operand(7, "output"),
      call.Operand(5, "softmax_aux"));
  const attention::Gradients gradients = ffi::ReadGradients(
      given.config, p, call.Operand(8, "doutput"),
      {call.Result(0, "dq"), call.Result(1, "dk"), call.Result(2, "dv"), call.Result(3, "dbias"),
       call.Result(4, "dsoftmax_offset")});
  TakeProblem(given, p);
  TakeSequences(given, {given.config, call.Operand(9, "q_cu_seqlens"),
                        call.Operand(10, "kv_cu_seqlens"), call.Operand(11, "q_seq_offsets"),
                        call.Operand(12, "k_seq_offsets")});
  const Array state = call.Operand(6, "rng_state");
  AttentionMemory& m = given.memory;
  m.random = ffi::RandomWords(given.config, state);
  m.words = m.random == nullptr ? 0 : state.size();
  m.out_grad = gradients.out_grad.data;
  m.q_grad = gradients.q_grad.data;
  m.k_grad = gradients.k_grad.data;
  m.v_grad = gradients.v_grad.data;
  m.bias_grad = gradients.bias_grad;
  m.sink_grad = gradients.sink_grad;
  TakeWorkspace(given, call.Result(5, "workspace"));
  return given;
}

void Check(const xffi::Dictionary& attributes) { ffi::AttentionConfig{attributes}; }

struct Planned : Kept {
  explicit Planned(AttentionPlan plan) : plan(std::move(plan)) {}
  AttentionPlan plan;
};

template <Given (*kRead)(const Call&), bool kIsBackward>
std::unique_ptr<Planned> Make(const Call& call, int device) {
  const Given given = kRead(call);
  const ffi::AttentionConfig& c = given.config;
  if (c.batch * c.q_length * c.kv_length == 0) {
    throw invalid_argument("q is ", call.Operand(0, "q").Text(), ": nothing sees anything");
  }
  const AttentionSteps steps(c, given.dtype, kIsBackward);
  const DnnPlans::Entry& entry = AttentionPlans().of(cudnn(), runtime(), device, steps.graph);
  return std::make_unique<Planned>(
      AttentionPlan(cudnn(), runtime(), entry, steps, given.memory.bytes));
}

template <Given (*kRead)(const Call&)>
void Body(const Call& call, Planned& planned) {
  planned.plan.run(kRead(call).memory, call.stream);
}

const PlannedHandlers<kForward, Check, Planned, Make<ReadForward, false>, Body<ReadForward>> kOne;
const PlannedHandlers<kBackward, Check, Planned, Make<ReadBackward, true>, Body<ReadBackward>>
    kTwo;

}  // namespace
}  // namespace jaxtap::cuda
