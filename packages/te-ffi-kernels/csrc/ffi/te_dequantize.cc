// Handler of dequantize.

#include <vector>

#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_dequantize_call.h"
#include "ffi/threads.h"
#include "te/dequantize.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

constexpr char kTarget[] = "te_ffi_kernels.dequantize";

using Config = DequantizeConfig;

void Warm(const Config& config) {
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

void Execute(const Config& config, xffi::ThreadPool pool, const Array& codes,
             const Array& scale_inv, const Array& out) {
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
  XlaScheduler scheduler(pool);
  te::dequantize(args, Parallel(scheduler));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kTarget, [&] { Warm(Config(attributes)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecute,
                       [](xffi::ThreadPool pool, xffi::AnyBuffer codes, xffi::AnyBuffer,
                          xffi::AnyBuffer, xffi::AnyBuffer scale_inv,
                          xffi::Result<xffi::AnyBuffer> out, xffi::Dictionary attributes) {
                         return Guarded(kTarget, [&] {
                           Execute(Config(attributes), pool, Read("x", codes),
                                   Read("scale_inv", scale_inv), Read("output", out));
                         });
                       },
                       xffi::Ffi::Bind()
                           .Ctx<xffi::ThreadPool>()
                           .Arg<xffi::AnyBuffer>()  // x
                           .Arg<xffi::AnyBuffer>()  // amax, not used
                           .Arg<xffi::AnyBuffer>()  // scale, not used
                           .Arg<xffi::AnyBuffer>()  // scale_inv
                           .Ret<xffi::AnyBuffer>()  // output
                           .Attrs());

const Registration kRegistration({kTarget, kInstantiate, kExecute});

}  // namespace
}  // namespace jaxtap::ffi
