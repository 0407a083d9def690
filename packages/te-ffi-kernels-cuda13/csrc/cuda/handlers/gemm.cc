// Handlers of gemm_v2 and grouped_gemm_v2: cuBLASLt's matmuls, planned by `prepare`. Unlike all
// others, those of groups wait for the device, since cuBLASLt must be told the size of each group
// before it's called: no CUDA graph has them.

#include <vector>

#include "cuda/gemm/grouped.h"
#include "cuda/gemm/handles.h"
#include "cuda/gemm/plan.h"
#include "cuda/handlers/planned.h"
#include "ffi/te_gemm_call.h"
#include "ffi/te_grouped_gemm_call.h"

namespace jaxtap::cuda {
namespace {

using ffi::GemmCall;
using ffi::GroupedGemmCall;

// A plan, or nothing where there is nothing to compute.
template <class Plan>
struct Planned : PerDevice {
  std::unique_ptr<Plan> plan;
};

template <class Plan, class Op, class Args>
std::unique_ptr<Planned<Plan>> PlanFor(const Op& given, const Args& args, bool fast,
                                       const Call& call, int device) {
  GemmPlan::Options options;
  options.has_bias = given.bias.size() > 0;
  options.fast = fast;
  options.workspace = static_cast<size_t>(call.Memory().size());
  CublasLt& lt = cublaslt();
  const LtHandle handle = lt_handles().of(lt, runtime(), device);
  auto made = std::make_unique<Planned<Plan>>();
  made->plan = std::make_unique<Plan>(lt, handle, args, options);
  return made;
}

template <class Op>
GemmMemory MemoryOf(const Op& given, const Call& call) {
  const Array workspace = call.Memory();
  GemmMemory memory;
  memory.alpha = static_cast<const float*>(given.alpha.data);
  memory.beta = static_cast<const float*>(given.beta.data);
  memory.workspace = workspace.data;
  memory.bytes = static_cast<size_t>(workspace.size());
  return memory;
}

std::unique_ptr<Planned<GemmPlan>> Make(const GemmCall& given, const Call& call, int device) {
  const te::Gemm& args = given.args;
  if (args.k == 0) throw invalid_argument("lhs is ", given.lhs.Text(), ": nothing is contracted");
  if (args.m == 0 || args.n == 0) return std::make_unique<Planned<GemmPlan>>();
  // As Transformer Engine has it.
  return PlanFor<GemmPlan>(given, args, !given.config.split_accumulator, call, device);
}

void Run(const GemmCall& given, const Call& call, Planned<GemmPlan>& planned) {
  if (planned.plan == nullptr) return;
  planned.plan->run(given.args, MemoryOf(given, call), call.stream);
}

std::unique_ptr<Planned<GroupedGemmPlan>> MakeGrouped(const GroupedGemmCall& given,
                                                      const Call& call, int device) {
  return PlanFor<GroupedGemmPlan>(given, given.args, true, call, device);
}

std::vector<int32_t> SizesOf(const GroupedGemmCall& given, Stream stream) {
  bool capturing = false;
  int code = runtime().is_capturing(stream, &capturing);
  std::vector<int32_t> sizes = even_sizes(given.args);
  if (code == 0 && !capturing && !sizes.empty()) {
    code = runtime().read_memory(sizes.data(), given.group_sizes.data,
                                 sizes.size() * sizeof(int32_t), stream);
  }
  check_run(runtime(), code, "reading the sizes of groups");
  te::check_group_sizes(given.args, sizes.data());
  return sizes;
}

void RunGrouped(const GroupedGemmCall& given, const Call& call, Planned<GroupedGemmPlan>& planned) {
  planned.plan->run(given.args, SizesOf(given, call.stream).data(), MemoryOf(given, call),
                    call.stream);
}

// The workspace is a result of Transformer Engine's, too.
const PlannedHandlers<GemmCall, Planned<GemmPlan>, Make, Run, Workspace::kNone> kGemm;
const PlannedHandlers<GroupedGemmCall, Planned<GroupedGemmPlan>, MakeGrouped, RunGrouped,
                      Workspace::kNone, Graphs::kNo>
    kGrouped;

}  // namespace
}  // namespace jaxtap::cuda
