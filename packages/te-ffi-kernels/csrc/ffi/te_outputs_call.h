// The results of operations that quantize what they compute: floats, or quantized values with their
// scales. Checked, whatever platform they are of.

#pragma once

#include <cstdint>
#include <vector>

#include "ffi/te_arguments.h"

namespace jaxtap::ffi {

// The first results of all that quantize. Those that aren't wanted are there all the same.
struct OutputArrays {
  template <class Call>
  explicit OutputArrays(const Call& call)
      : out(call.Result(0, "output")),
        colwise_out(call.Result(1, "colwise_output")),
        scale_inv(call.Result(2, "scale_inv")),
        colwise_scale_inv(call.Result(3, "colwise_scale_inv")),
        updated_amax(call.Result(4, "updated_amax")) {}

  te::QType QType(te::Layout layout) const {
    return te::qtype_of((te::has_rowwise(layout) ? out : colwise_out).dtype);
  }

  std::vector<Array> Unwanted(te::Layout layout) const {
    if (!te::has_rowwise(layout)) return {out, scale_inv};
    if (!te::has_colwise(layout)) return {colwise_out, colwise_scale_inv};
    return {};
  }

  // Sets where a quantizer's quantized values and their scales go.
  template <class Quantize>
  void Direct(te::Layout layout, Quantize& args) const {
    args.qtype = QType(layout);
    if (te::has_rowwise(layout)) {
      args.qvalues = static_cast<uint8_t*>(out.data);
      args.scales = scale_inv.data;
    }
    if (te::has_colwise(layout)) {
      args.colwise = static_cast<uint8_t*>(colwise_out.data);
      args.colwise_scales = colwise_scale_inv.data;
    }
  }

  // Throws for quantized values by row and by column of different dtypes.
  void NeedOneQType(te::Layout layout) const {
    if (layout != te::Layout::kBoth || out.dtype == colwise_out.dtype) return;
    throw invalid_argument("colwise_output must be of ", jaxtap::name(out.dtype), " like output, "
                           "got ", colwise_out.Text());
  }

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

// The results of a matrix of `dtype`, and what it's quantized with.
struct Outputs : OutputArrays {
  // Operands `at` and `at` + 1 are the scale and the largest magnitude so far.
  template <class Call>
  Outputs(const Call& call, const OutputConfig& asked, int64_t at, DType of, const Matrix& flat)
      : OutputArrays(call),
        config(asked),
        dtype(of),
        matrix(flat),
        scale(call.Operand(at, "scale")),
        amax(call.Operand(at + 1, "amax")) {
    NeedSize(amax.NeedDtype({DType::F32}), 1, "the largest magnitude so far");
    NeedSize(updated_amax.NeedDtype({DType::F32}), 1, "the largest magnitude");
    if (!config.quantizes()) {
      NeedSize(out.NeedDtype({dtype}), matrix.rows * matrix.cols,
               "one for each number of the result");
      return;
    }
    if (te::has_rowwise(config.layout)) {
      CheckDirection(out, matrix, out, scale_inv, config.scaling, false);
    }
    if (te::has_colwise(config.layout)) {
      CheckDirection(colwise_out, matrix, colwise_out, colwise_scale_inv, config.scaling, true);
    }
    NeedOneQType(config.layout);
    if (config.scaling == te::Scaling::kDelayedTensor) {
      NeedSize(scale.NeedDtype({DType::F32}), 1, "what the result is multiplied with");
    }
  }

  std::vector<Array> Unwanted() const {
    if (!config.quantizes()) return {colwise_out, scale_inv, colwise_scale_inv};
    return OutputArrays::Unwanted(config.layout);
  }

  OutputConfig config;
  DType dtype;
  Matrix matrix;
  Array scale, amax;
};

}  // namespace jaxtap::ffi
