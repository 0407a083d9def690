// Handlers of dequantize.

#include "cuda/kernels/dequantize.h"

#include "cuda/handlers/handler.h"
#include "ffi/te_dequantize_call.h"

namespace jaxtap::cuda {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.dequantize";

void Check(const xffi::Dictionary& attributes) { ffi::DequantizeConfig{attributes}; }

void Body(const Call& call) {
  call.NeedCounts(4, 1);  // x, amax and scale, which aren't used, scale_inv
  const ffi::DequantizeConfig config(call.attributes);
  const Array codes = call.Operand(0, "x"), scale_inv = call.Operand(3, "scale_inv");
  const Array out = call.Result(0, "output");
  const ffi::Matrix matrix = ffi::CheckDequantize(config, codes, scale_inv, out);
  Dequantize args;
  args.codes = static_cast<const uint8_t*>(codes.data);
  args.rows = matrix.rows;
  args.cols = matrix.cols;
  args.code = te::code_of(codes.dtype);
  args.scaling = config.scaling;
  args.scales = scale_inv.data;
  args.by_column = config.is_colwise;
  args.out = out.data;
  args.dtype = te::float_of(out.dtype);
  dequantize(args, call.stream);
}

const Handlers<kTarget, Check, Body> kHandlers;

}  // namespace
}  // namespace jaxtap::cuda
