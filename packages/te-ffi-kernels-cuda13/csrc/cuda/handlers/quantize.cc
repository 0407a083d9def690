// Handlers of dbias_quantize.

#include "cuda/kernels/quantize.h"

#include "cuda/handlers/handler.h"
#include "ffi/te_quantize_call.h"

namespace jaxtap::cuda {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.dbias_quantize";

void Check(const xffi::Dictionary& attributes) {
  ffi::QuantizeConfigOf(attributes).Check();
}

void Body(const Call& call) {
  // x, scale, amax, and what only NVFP4 has: sr_rng_state, post_rht_amax, rht_matrix. The last
  // result is a workspace, which isn't used.
  call.NeedCounts(6, 7);
  const ffi::QuantizeConfig config = ffi::QuantizeConfigOf(call.attributes);
  const ffi::QuantizeCall given = {call.Operand(0, "x"),
                                   call.Operand(1, "scale"),
                                   call.Operand(2, "amax"),
                                   call.Result(0, "output"),
                                   call.Result(1, "colwise_output"),
                                   call.Result(2, "scale_inv"),
                                   call.Result(3, "colwise_scale_inv"),
                                   call.Result(4, "updated_amax"),
                                   call.Result(5, "dbias")};
  const ffi::Matrix matrix = given.Check(config);
  Quantize args;
  args.x = given.x.data;
  args.dtype = te::float_of(given.x.dtype);
  args.rows = matrix.rows;
  args.cols = matrix.cols;
  args.code = te::code_of(given.CodeDtype(config));
  args.scaling = config.scaling();
  args.scale = static_cast<const float*>(given.scale.data);
  args.amax = static_cast<const float*>(given.amax.data);
  args.updated_amax = static_cast<float*>(given.updated_amax.data);
  if (te::has_rowwise(config.layout())) {
    args.codes = static_cast<uint8_t*>(given.out.data);
    args.scales = given.scale_inv.data;
  } else {
    call.Clear({given.out, given.scale_inv});
  }
  if (te::has_colwise(config.layout())) {
    args.turned = static_cast<uint8_t*>(given.colwise_out.data);
    args.turned_scales = given.colwise_scale_inv.data;
  } else {
    call.Clear({given.colwise_out, given.colwise_scale_inv});
  }
  if (config.is_dbias) {
    args.sums = given.dbias.data;
  } else {
    call.Clear({given.dbias});
  }
  quantize(args, call.stream);
}

const Handlers<kTarget, Check, Body> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
