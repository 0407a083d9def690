// The results of operations that quantize what they compute: floats, or codes with their scales.
// Checked, whatever platform they are of.

#pragma once

#include <cstdint>

#include "ffi/te_arguments.h"

namespace jaxtap::ffi {

struct Outputs {
  Array out, colwise_out, scale_inv, colwise_scale_inv, updated_amax;
};

// How an operation was asked to quantize.
struct OutputConfig {
  OutputConfig(int64_t scaling_mode, int64_t q_layout, bool output_amax_when_no_scaling)
      : scaling(te::scaling_of(scaling_mode)),
        layout(te::layout_of(q_layout)),
        wants_absmax(output_amax_when_no_scaling) {
    if (wants_absmax && scaling != te::Scaling::kNone) {
      throw invalid_argument("output_amax_when_no_scaling is set, and scaling_mode is ",
                             static_cast<int64_t>(scaling), "; it is for scaling_mode 0 (none)");
    }
  }

  te::Scaling scaling;
  te::Layout layout;
  bool wants_absmax;

  bool quantizes() const { return scaling != te::Scaling::kNone; }
  // Whether the result is computed in parts of rows.
  bool cuts() const { return quantizes() && te::has_colwise(layout); }
};

// Checks the results of a matrix that is flattened from an array of `like`'s dtype.
inline void CheckOutputs(const OutputConfig& config, const Array& like, const Matrix& matrix,
                         const Array& scale, const Array& amax, const Outputs& outputs) {
  NeedSize(amax.NeedDtype({DType::F32}), 1, "the largest magnitude so far");
  NeedSize(outputs.updated_amax.NeedDtype({DType::F32}), 1, "the largest magnitude");
  if (!config.quantizes()) {
    NeedSize(outputs.out.NeedDtype({like.dtype}), matrix.rows * matrix.cols,
             "one for each number of the result");
    return;
  }
  if (te::has_rowwise(config.layout)) {
    CheckDirection(outputs.out, matrix, outputs.out, outputs.scale_inv, config.scaling, false);
  }
  if (te::has_colwise(config.layout)) {
    CheckDirection(outputs.colwise_out, matrix, outputs.colwise_out, outputs.colwise_scale_inv,
                   config.scaling, true);
    if (te::has_rowwise(config.layout) && outputs.out.dtype != outputs.colwise_out.dtype) {
      throw invalid_argument("colwise_output is ", outputs.colwise_out.Text(),
                             ", and must be of ", jaxtap::name(outputs.out.dtype), " like output");
    }
  }
  if (config.scaling == te::Scaling::kDelayedTensor) {
    NeedSize(scale.NeedDtype({DType::F32}), 1, "what the result is multiplied with");
  }
}

}  // namespace jaxtap::ffi
