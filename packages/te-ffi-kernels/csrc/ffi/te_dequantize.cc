// Handler of dequantize.

#include <vector>

#include "ffi/call.h"
#include "ffi/te_dequantize_call.h"
#include "te/dequantize.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.dequantize";

void Warm(const Attributes& attributes) {
  const DequantizeConfig config(attributes);
  std::vector<uint8_t> codes(te::kTile * te::kTile), scales(codes.size(), 127);
  std::vector<float> out(codes.size());
  te::Dequantize args;
  args.codes = codes.data();
  args.rows = args.cols = te::kTile;
  args.scaling = config.scaling;
  args.scales = scales.data();
  args.by_column = config.is_colwise;
  args.out = out.data();
  te::dequantize(args, Parallel());
}

void Execute(const Call& call) {
  call.NeedCounts(4, 1);  // x, amax and scale, which aren't used, and scale_inv
  const DequantizeConfig config(call.attributes);
  const Array codes = call.Operand(0, "x"), scale_inv = call.Operand(3, "scale_inv");
  const Array out = call.Result(0, "output");
  const Matrix matrix = CheckDequantize(config, codes, scale_inv, out);
  te::Dequantize args;
  args.rows = matrix.rows;
  args.cols = matrix.cols;
  args.codes = static_cast<const uint8_t*>(codes.data);
  args.code = te::code_of(codes.dtype);
  args.scaling = config.scaling;
  args.scales = scale_inv.data;
  args.by_column = config.is_colwise;
  args.out = out.data;
  args.dtype = te::float_of(out.dtype);
  XlaScheduler scheduler(call);
  te::dequantize(args, Parallel(scheduler));
}

const Handlers<kTarget, Warm, Execute> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
