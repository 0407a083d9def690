// Handlers of grouped_quantize. Transformer Engine's copy the sizes of groups to the host and wait
// for them, which leaves no room for a warm-up; here nothing but kernels looks at them.

#include "cuda/kernels/grouped.h"

#include "cuda/handlers/handler.h"
#include "ffi/te_grouped_call.h"

namespace jaxtap::cuda {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.grouped_quantize";

void Check(const xffi::Dictionary& attributes) { ffi::GroupedConfig{attributes}; }

void Body(const Call& call) {
  call.NeedCounts(3, 6);
  const ffi::GroupedConfig config(call.attributes);
  const ffi::GroupedCall given = {call.Operand(0, "x"),
                                  call.Operand(1, "scale"),
                                  call.Operand(2, "group_sizes"),
                                  call.Result(0, "output"),
                                  call.Result(1, "colwise_output"),
                                  call.Result(2, "scale_inv"),
                                  call.Result(3, "colwise_scale_inv"),
                                  call.Result(4, "updated_amax")};
  const ffi::Groups groups = given.Check(config);
  const Array workspace = call.Result(5, "workspace");
  NeedSize(workspace.NeedDtype({DType::U8}),
           (groups.count + 1) * static_cast<int64_t>(sizeof(GroupStart)),
           "those of where groups begin");
  GroupedQuantize args;
  args.x = given.x.data;
  args.dtype = te::float_of(given.x.dtype);
  args.length = given.x.shape[0];
  args.rows_each = groups.rows_each;
  args.cols = groups.matrix.cols;
  args.sizes = static_cast<const int32_t*>(given.group_sizes.data);
  args.groups = groups.count;
  args.code = te::code_of(given.CodeDtype(config));
  args.scaling = config.scaling;
  args.scale = static_cast<const float*>(given.scale.data);
  if (config.rowwise) {
    args.codes = static_cast<uint8_t*>(given.out.data);
    args.scales = given.scale_inv.data;
  } else {
    call.Clear({given.out, given.scale_inv});
  }
  if (config.colwise) {
    args.turned = static_cast<uint8_t*>(given.colwise_out.data);
    args.turned_scales = given.colwise_scale_inv.data;
  } else {
    call.Clear({given.colwise_out, given.colwise_scale_inv});
  }
  args.absmax = static_cast<float*>(given.updated_amax.data);
  args.starts = static_cast<GroupStart*>(workspace.data);
  grouped_quantize(args, call.stream);
}

const Handlers<kTarget, Check, Body> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
