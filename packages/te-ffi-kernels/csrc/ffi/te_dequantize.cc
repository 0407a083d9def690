// Handler of dequantize. Transformer Engine's has no attributes, and takes float8 with one scale;
// the attributes scaling_mode, is_colwise and flatten_axis are ours, and may be left out.

#include <vector>

#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_arguments.h"
#include "ffi/threads.h"
#include "te/dequantize.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

constexpr char kTarget[] = "te_ffi_kernels.dequantize";

template <typename T>
T Optional(const xffi::Dictionary& attributes, const char* name, T otherwise) {
  if (!attributes.contains(name)) return otherwise;
  const auto value = attributes.get<T>(name);
  if (!value.has_value()) {
    throw invalid_argument("attribute ", name, " has another type than it must have");
  }
  return *value;
}

struct Config {
  explicit Config(const xffi::Dictionary& attributes)
      : scaling(te::scaling_of(Optional<int64_t>(attributes, "scaling_mode", 1))),
        is_colwise(Optional<bool>(attributes, "is_colwise", false)),
        flatten_axis(Optional<int64_t>(attributes, "flatten_axis", -1)) {
    if (scaling == Scaling::kNone) {
      throw invalid_argument("scaling_mode is 0, with which there is nothing to dequantize");
    }
  }

  Scaling scaling;
  bool is_colwise;
  int64_t flatten_axis;
};

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
  NeedCodes(codes, config.scaling);
  NeedScales(scale_inv, config.scaling);
  NeedFloat(out);
  NeedSize(out, codes.size(), "one for each code");
  te::Dequantize args;
  if (te::is_tensor(config.scaling)) {
    args.rows = 1;
    args.cols = codes.size();
    NeedSize(scale_inv, 1, "the scale of all codes");
  } else {
    const Matrix matrix = Flatten(codes, config.flatten_axis, "flatten_axis");
    args.rows = matrix.rows;
    args.cols = matrix.cols;
    if (config.scaling == Scaling::kChannel) {
      NeedSize(scale_inv, matrix.rows, "one for each row of codes");
    } else {
      NeedBlocks(codes, config.is_colwise ? matrix.rows : matrix.cols,
                 config.is_colwise ? "rows (axes before flatten_axis)"
                                   : "columns (axes from flatten_axis)");
      NeedSize(scale_inv, codes.size() / te::kBlock, "one for 32 codes");
    }
  }
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
