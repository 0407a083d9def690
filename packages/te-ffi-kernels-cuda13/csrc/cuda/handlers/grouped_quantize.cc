// Handlers of grouped_quantize. Transformer Engine's copy the sizes of groups to the host and wait
// for them, which leaves no room for a warm-up; here nothing but kernels looks at them.

#include "cuda/kernels/grouped.h"

#include "cuda/handlers/handler.h"
#include "ffi/te_quantize_call.h"

namespace jaxtap::cuda {
namespace {

void Run(const ffi::GroupedCall& given, const Call& call) {
  const ffi::GroupedConfig& config = given.config;
  const Array workspace = call.Memory();
  NeedSize(workspace, (given.groups + 1) * static_cast<int64_t>(sizeof(GroupStart)),
           "those of where groups begin");
  GroupedQuantize args;
  args.x = given.x.data;
  args.dtype = te::float_of(given.x.dtype);
  args.length = given.x.shape[0];
  args.rows_each = given.rows_each;
  args.cols = given.matrix.cols;
  args.sizes = static_cast<const int32_t*>(given.group_sizes.data);
  args.groups = given.groups;
  args.scaling = config.scaling;
  args.scale = static_cast<const float*>(given.scale.data);
  call.Clear(given.outputs.Unwanted(config.layout));
  given.outputs.Direct(config.layout, args);
  args.absmax = static_cast<float*>(given.outputs.updated_amax.data);
  args.starts = static_cast<GroupStart*>(workspace.data);
  grouped_quantize(args, call.stream);
}

const Handlers<ffi::GroupedCall, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
