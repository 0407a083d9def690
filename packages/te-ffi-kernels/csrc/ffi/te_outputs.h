// The results of operations that quantize what they compute, on CPU.

#pragma once

#include <cstdint>

#include "ffi/call.h"
#include "ffi/te_outputs_call.h"
#include "te/quantize.h"

namespace jaxtap::ffi {

inline Outputs ReadOutputs(const Call& call) {
  return {call.Result(0, "output"), call.Result(1, "colwise_output"), call.Result(2, "scale_inv"),
          call.Result(3, "colwise_scale_inv"), call.Result(4, "updated_amax")};
}

// Computes checked results. `sums` is for those over rows, in `dtype`, or nullptr.
inline void RunOutputs(const OutputConfig& config, const te::Source& source, DType dtype,
                       const Matrix& matrix, const Array& scale, const Array& amax,
                       const Outputs& outputs, void* sums, const Parallel& parallel) {
  const bool rowwise = te::has_rowwise(config.layout), colwise = te::has_colwise(config.layout);
  const bool tensor = te::is_tensor(config.scaling);
  te::Quantize args;
  args.source = &source;
  args.dtype = te::float_of(dtype);
  args.rows = matrix.rows;
  args.cols = matrix.cols;
  args.scaling = config.scaling;
  // It may be the same memory as the result.
  const float before = *static_cast<const float*>(amax.data);
  float found = 0.0f;
  if (!config.quantizes()) {
    Clear({outputs.colwise_out, outputs.scale_inv, outputs.colwise_scale_inv});
    args.out = outputs.out.data;
    args.sums = sums;
    args.wants_absmax = config.wants_absmax;
    found = te::quantize(args, parallel);
  } else {
    if (!rowwise) Clear({outputs.out, outputs.scale_inv});
    if (!colwise) Clear({outputs.colwise_out, outputs.colwise_scale_inv});
    args.code = te::code_of((rowwise ? outputs.out : outputs.colwise_out).dtype);
    const bool current = config.scaling == te::Scaling::kCurrentTensor;
    if (current) {
      // What is quantized are numbers of the dtype, as if they had been stored before.
      args.rounded = true;
      args.wants_absmax = true;
      found = te::quantize(args, parallel);
      args.scale = te::tensor_scale(found, args.code);
    } else if (tensor) {
      args.scale = *static_cast<const float*>(scale.data);
    }
    if (rowwise) {
      args.codes = static_cast<uint8_t*>(outputs.out.data);
      args.scales = outputs.scale_inv.data;
      if (tensor) *static_cast<float*>(outputs.scale_inv.data) = 1.0f / args.scale;
    }
    if (colwise) {
      args.turned = static_cast<uint8_t*>(outputs.colwise_out.data);
      args.turned_scales = outputs.colwise_scale_inv.data;
      if (tensor) *static_cast<float*>(outputs.colwise_scale_inv.data) = 1.0f / args.scale;
    }
    args.sums = sums;
    args.wants_absmax = tensor && !current;
    const float most = te::quantize(args, parallel);
    if (!current) found = most;
  }
  const bool updates = tensor || config.wants_absmax;
  *static_cast<float*>(outputs.updated_amax.data) = updates && !(before >= found) ? found : before;
}

}  // namespace jaxtap::ffi
