// Handlers of gemm_v2: cuBLASLt's matmuls, planned by `prepare`.

#include "cuda/gemm/handles.h"
#include "cuda/gemm/plan.h"
#include "cuda/handlers/planned.h"
#include "ffi/te_gemm_call.h"

namespace jaxtap::cuda {
namespace {

using ffi::GemmCall;

// A plan, or nothing where there is nothing to compute.
struct Planned : PerDevice {
  std::unique_ptr<GemmPlan> plan;
};

std::unique_ptr<Planned> Make(const GemmCall& given, const Call& call, int device) {
  const te::Gemm& args = given.args;
  if (args.k == 0) throw invalid_argument("lhs is ", given.lhs.Text(), ": nothing is contracted");
  auto made = std::make_unique<Planned>();
  if (args.m == 0 || args.n == 0) return made;
  GemmPlan::Options options;
  options.has_bias = given.bias.size() > 0;
  // As Transformer Engine has it.
  options.fast = !given.config.split_accumulator;
  options.workspace = static_cast<size_t>(call.Memory().size());
  CublasLt& lt = cublaslt();
  const LtHandle handle = lt_handles().of(lt, runtime(), device);
  made->plan = std::make_unique<GemmPlan>(lt, handle, args, options);
  return made;
}

void Run(const GemmCall& given, const Call& call, Planned& planned) {
  if (planned.plan == nullptr) return;
  const Array workspace = call.Memory();
  GemmMemory memory;
  memory.alpha = static_cast<const float*>(given.alpha.data);
  memory.beta = static_cast<const float*>(given.beta.data);
  memory.workspace = workspace.data;
  memory.bytes = static_cast<size_t>(workspace.size());
  planned.plan->run(given.args, memory, call.stream);
}

// The workspace is a result of Transformer Engine's, too.
const PlannedHandlers<GemmCall, Planned, Make, Run, Workspace::kNone> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
