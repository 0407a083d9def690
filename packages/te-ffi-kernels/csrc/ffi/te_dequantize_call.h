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
      : scaling(QuantizedScaling(AttributeOr<int64_t>(attributes, "scaling_mode", 1))),
        is_colwise(AttributeOr<bool>(attributes, "is_colwise", false)),
        flatten_axis(AttributeOr<int64_t>(attributes, "flatten_axis", -1)) {}

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
    const Array qvalues = call.Operand(0, "x"), scale_inv = call.Operand(3, "scale_inv");
    const Array out = call.Result(0, "output");
    const Matrix matrix = Check(config, qvalues, scale_inv, out);
    args.qvalues = static_cast<const uint8_t*>(qvalues.data);
    args.rows = matrix.rows;
    args.cols = matrix.cols;
    args.qtype = te::qtype_of(qvalues.dtype);
    args.scaling = config.scaling;
    args.scales = scale_inv.data;
    args.by_column = config.is_colwise;
    args.out = out.data;
    args.dtype = te::float_of(out.dtype);
  }

  te::Dequantize args;

 private:
  // Returns what the quantized values are taken as.
  static Matrix Check(const Config& config, const Array& qvalues, const Array& scale_inv,
                      const Array& out) {
    NeedQValues(qvalues, config.scaling);
    NeedFloat(out);
    NeedSize(out, qvalues.size(), "one for each quantized value");
    Matrix matrix = {1, qvalues.size(), 0};
    if (!te::is_tensor(config.scaling)) {
      matrix = Flatten(qvalues, config.flatten_axis, "flatten_axis");
    }
    if (config.scaling == te::Scaling::kMx) NeedBlocks(qvalues, matrix, config.is_colwise);
    CheckScales(scale_inv, config.scaling, 1, matrix.rows, qvalues.size());
    return matrix;
  }
};

}  // namespace jaxtap::ffi
