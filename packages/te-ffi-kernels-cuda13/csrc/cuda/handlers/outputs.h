// The results of operations that quantize what they compute, as arguments of kernels.

#pragma once

#include "cuda/handlers/handler.h"
#include "cuda/kernels/quantize.h"
#include "ffi/te_outputs_call.h"

namespace jaxtap::cuda {

// Of checked results. Those that aren't wanted are zeros.
inline Quantize OutputsOf(const Call& call, const ffi::OutputConfig& config, DType dtype,
                          const ffi::Matrix& matrix, const Array& scale, const Array& amax,
                          const ffi::Outputs& outputs) {
  Quantize args;
  args.dtype = te::float_of(dtype);
  args.rows = matrix.rows;
  args.cols = matrix.cols;
  args.scaling = config.scaling;
  args.amax = static_cast<const float*>(amax.data);
  args.updated_amax = static_cast<float*>(outputs.updated_amax.data);
  args.wants_absmax = config.wants_absmax;
  if (!config.quantizes()) {
    args.out = outputs.out.data;
    call.Clear({outputs.colwise_out, outputs.scale_inv, outputs.colwise_scale_inv});
    return args;
  }
  const bool rowwise = te::has_rowwise(config.layout), colwise = te::has_colwise(config.layout);
  args.code = te::code_of((rowwise ? outputs.out : outputs.colwise_out).dtype);
  if (config.scaling == te::Scaling::kDelayedTensor) {
    args.scale = static_cast<const float*>(scale.data);
  }
  if (rowwise) {
    args.codes = static_cast<uint8_t*>(outputs.out.data);
    args.scales = outputs.scale_inv.data;
  } else {
    call.Clear({outputs.out, outputs.scale_inv});
  }
  if (colwise) {
    args.turned = static_cast<uint8_t*>(outputs.colwise_out.data);
    args.turned_scales = outputs.colwise_scale_inv.data;
  } else {
    call.Clear({outputs.colwise_out, outputs.colwise_scale_inv});
  }
  return args;
}

}  // namespace jaxtap::cuda
