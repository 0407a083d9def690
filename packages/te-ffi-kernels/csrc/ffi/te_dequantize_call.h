// What a call of dequantize is given, checked, whatever platform it runs on. Transformer Engine's
// has no attributes, and takes float8 with one scale; the attributes scaling_mode, is_colwise and
// flatten_axis are ours, and may be left out.

#pragma once

#include "ffi/te_arguments.h"

namespace jaxtap::ffi {

template <typename T, class Attributes>
T Optional(const Attributes& attributes, const char* name, T otherwise) {
  if (!attributes.contains(name)) return otherwise;
  const auto value = attributes.template get<T>(name);
  if (!value.has_value()) {
    throw invalid_argument("attribute ", name, " has another type than it must have");
  }
  return *value;
}

struct DequantizeConfig {
  template <class Attributes>
  explicit DequantizeConfig(const Attributes& attributes)
      : scaling(te::scaling_of(Optional<int64_t>(attributes, "scaling_mode", 1))),
        is_colwise(Optional<bool>(attributes, "is_colwise", false)),
        flatten_axis(Optional<int64_t>(attributes, "flatten_axis", -1)) {
    if (scaling == te::Scaling::kNone) {
      throw invalid_argument("scaling_mode is 0, with which there is nothing to dequantize");
    }
  }

  te::Scaling scaling;
  bool is_colwise;
  int64_t flatten_axis;
};

// Returns what the codes are taken as.
inline Matrix CheckDequantize(const DequantizeConfig& config, const Array& codes,
                              const Array& scale_inv, const Array& out) {
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

}  // namespace jaxtap::ffi
