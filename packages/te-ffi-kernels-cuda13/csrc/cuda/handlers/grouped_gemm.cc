// Handlers of grouped_gemm_v2. Unlike all others they wait for the device, since cuBLASLt must be
// told the size of each group before it's called: no CUDA graph has them.

#include <vector>

#include "cuda/gemm/grouped.h"
#include "cuda/gemm/handles.h"
#include "cuda/handlers/planned.h"
#include "ffi/te_grouped_gemm_call.h"

namespace jaxtap::cuda {
namespace {

using ffi::GroupedGemmCall;

struct Planned : PerDevice {
  std::unique_ptr<GroupedGemmPlan> plan;
};

std::unique_ptr<Planned> Make(const GroupedGemmCall& given, const Call& call, int device) {
  GemmPlan::Options options;
  options.has_bias = given.bias.size() > 0;
  options.fast = true;
  options.workspace = static_cast<size_t>(call.Memory().size());
  CublasLt& lt = cublaslt();
  auto made = std::make_unique<Planned>();
  made->plan = std::make_unique<GroupedGemmPlan>(lt, lt_handles().of(lt, runtime(), device),
                                                 given.args, options);
  return made;
}

std::vector<int32_t> SizesOf(const GroupedGemmCall& given, Stream stream) {
  bool capturing = false;
  int code = runtime().is_capturing(stream, &capturing);
  std::vector<int32_t> sizes = even_sizes(given.args);
  if (code == 0 && !capturing && !sizes.empty()) {
    code = runtime().read_memory(sizes.data(), given.group_sizes.data,
                                 sizes.size() * sizeof(int32_t), stream);
  }
  if (code != 0) runtime().clear_error();
  runtime().check(code, "reading the sizes of groups");
  te::check_group_sizes(given.args, sizes.data());
  return sizes;
}

void Run(const GroupedGemmCall& given, const Call& call, Planned& planned) {
  const Array workspace = call.Memory();
  GemmMemory memory;
  memory.alpha = static_cast<const float*>(given.alpha.data);
  memory.beta = static_cast<const float*>(given.beta.data);
  memory.workspace = workspace.data;
  memory.bytes = static_cast<size_t>(workspace.size());
  planned.plan->run(given.args, SizesOf(given, call.stream).data(), memory, call.stream);
}

// The workspace is a result of Transformer Engine's, too.
const PlannedHandlers<GroupedGemmCall, Planned, Make, Run, Workspace::kNone, Graphs::kNo> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
