// What a call of dequantize is given, checked, whatever platform it runs on. Transformer Engine's
// has no attributes, and takes float8 with one scale; the attributes scaling_mode, is_colwise and
// flatten_axis are ours, and may be left out.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "te/dequantize.h"

namespace jaxtap::ffi {

struct DequantizeConfig {
  template <class Attributes>
  explicit DequantizeConfig(const Attributes& attributes)
      : scaling(te::scaling_of(AttributeOr<int64_t>(attributes, "scaling_mode", 1))),
        is_colwise(AttributeOr<bool>(attributes, "is_colwise", false)),
        flatten_axis(AttributeOr<int64_t>(attributes, "flatten_axis", -1)) {
    if (scaling == te::Scaling::kNone) {
      throw invalid_argument("scaling_mode is 0, with which there is nothing to dequantize");
    }
  }

  te::Scaling scaling;
  bool is_colwise;
  int64_t flatten_axis;
};

struct DequantizeCall {
  static constexpr char kTarget[] = "te_ffi_kernels.dequantize";
  using Config = DequantizeConfig;

  template <class Call>
  explicit DequantizeCall(const Call& call) {
    const auto config = ConfigOf<Config>(call, 4, 1);  // amax and scale aren't used
    const Array codes = call.Operand(0, "x"), scale_inv = call.Operand(3, "scale_inv");
    const Array out = call.Result(0, "output");
    const Matrix matrix = Check(config, codes, scale_inv, out);
    args.codes = static_cast<const uint8_t*>(codes.data);
    args.rows = matrix.rows;
    args.cols = matrix.cols;
    args.code = te::code_of(codes.dtype);
    args.scaling = config.scaling;
    args.scales = scale_inv.data;
    args.by_column = config.is_colwise;
    args.out = out.data;
    args.dtype = te::float_of(out.dtype);
  }

  te::Dequantize args;

 private:
  // Returns what the codes are taken as.
  static Matrix Check(const Config& config, const Array& codes, const Array& scale_inv,
                      const Array& out) {
    NeedCodes(codes, config.scaling);
    NeedScales(scale_inv, config.scaling);
    NeedFloat(out);
    NeedSize(out, codes.size(), "one for each code");
    if (te::is_tensor(config.scaling)) {
      NeedSize(scale_inv, 1, "the scale of all codes");
      return {1, codes.size(), 0};
    }
    const Matrix matrix = Flatten(codes, config.flatten_axis, "flatten_axis");
    if (config.scaling == te::Scaling::kChannel) {
      NeedSize(scale_inv, matrix.rows, "one for each row of codes");
    } else {
      NeedBlocks(codes, config.is_colwise ? matrix.rows : matrix.cols,
                 config.is_colwise ? "rows (axes before flatten_axis)"
                                   : "columns (axes from flatten_axis)");
      NeedSize(scale_inv, codes.size() / te::kBlock, "one for 32 codes");
    }
    return matrix;
  }
};

}  // namespace jaxtap::ffi
