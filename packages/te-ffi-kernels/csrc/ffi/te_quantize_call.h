// What a call of dbias_quantize is given, checked, whatever platform it runs on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"

namespace jaxtap::ffi {

inline te::Scaling QuantizedScaling(int64_t value) {
  const te::Scaling scaling = te::scaling_of(value);
  if (scaling == te::Scaling::kNone) {
    throw invalid_argument("scaling_mode is 0, with which there is nothing to quantize");
  }
  return scaling;
}

struct QuantizeConfig {
  int64_t scaling_mode, q_layout;
  bool is_dbias;
  int64_t flatten_axis;
  bool stochastic_rounding, use_rht;

  te::Scaling scaling() const { return QuantizedScaling(scaling_mode); }
  te::Layout layout() const { return te::layout_of(q_layout); }

  void Check() const {
    scaling();
    layout();
    if (stochastic_rounding) {
      throw invalid_argument("stochastic_rounding is set, which there is for NVFP4 alone, and for "
                             "that no kernel; leave it unset");
    }
    if (use_rht) {
      throw invalid_argument("use_rht is set: random Hadamard transforms are for NVFP4 alone, which "
                             "there is no kernel for; leave it unset");
    }
  }
};

template <class Attributes>
QuantizeConfig QuantizeConfigOf(const Attributes& attributes) {
  return {NeedAttribute<int64_t>(attributes, "scaling_mode"),
          NeedAttribute<int64_t>(attributes, "q_layout"),
          NeedAttribute<bool>(attributes, "is_dbias"),
          NeedAttribute<int64_t>(attributes, "flatten_axis"),
          NeedAttribute<bool>(attributes, "stochastic_rounding"),
          NeedAttribute<bool>(attributes, "use_rht")};
}

struct QuantizeCall {
  Array x, scale, amax;
  Array out, colwise_out, scale_inv, colwise_scale_inv, updated_amax, dbias;

  DType CodeDtype(const QuantizeConfig& config) const {
    return te::has_rowwise(config.layout()) ? out.dtype : colwise_out.dtype;
  }

  // Returns what x is taken as.
  Matrix Check(const QuantizeConfig& config) const {
    config.Check();
    const te::Scaling scaling = config.scaling();
    NeedFloat(x);
    const Matrix matrix = Flatten(x, config.flatten_axis, "flatten_axis");
    NeedSize(amax.NeedDtype({DType::F32}), 1, "the largest magnitude so far");
    NeedSize(updated_amax.NeedDtype({DType::F32}), 1, "the largest magnitude");
    const bool rowwise = te::has_rowwise(config.layout()), colwise = te::has_colwise(config.layout());
    if (rowwise) CheckDirection(x, matrix, out, scale_inv, scaling, false);
    if (colwise) CheckDirection(x, matrix, colwise_out, colwise_scale_inv, scaling, true);
    if (rowwise && colwise && out.dtype != colwise_out.dtype) {
      throw invalid_argument("colwise_output is ", colwise_out.Text(), ", and must be of ",
                             jaxtap::name(out.dtype), " like output");
    }
    if (config.is_dbias) {
      NeedSize(dbias.NeedDtype({x.dtype}), matrix.cols, "one for each column of x");
    }
    if (te::is_tensor(scaling)) {
      NeedSize(scale.NeedDtype({DType::F32}), 1, "what x is multiplied with");
    }
    return matrix;
  }
};

}  // namespace jaxtap::ffi
