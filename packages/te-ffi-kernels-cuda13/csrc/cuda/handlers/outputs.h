// The results of operations that quantize what they compute, as arguments of kernels.

#pragma once

#include "cuda/handlers/handler.h"
#include "cuda/kernels/quantize.h"
#include "ffi/te_outputs_call.h"

namespace jaxtap::cuda {

// Of checked results. Those that aren't wanted are zeros.
inline Quantize OutputsOf(const Call& call, const ffi::Outputs& outputs) {
  const ffi::OutputConfig& config = outputs.config;
  Quantize args;
  args.dtype = te::float_of(outputs.dtype);
  args.rows = outputs.matrix.rows;
  args.cols = outputs.matrix.cols;
  args.scaling = config.scaling;
  args.amax = static_cast<const float*>(outputs.amax.data);
  args.updated_amax = static_cast<float*>(outputs.updated_amax.data);
  args.wants_absmax = config.wants_absmax;
  call.Clear(outputs.Unwanted());
  if (!config.quantizes()) {
    args.out = outputs.out.data;
    return args;
  }
  if (config.scaling == te::Scaling::kDelayedTensor) {
    args.scale = static_cast<const float*>(outputs.scale.data);
  }
  outputs.Direct(config.layout, args);
  return args;
}

}  // namespace jaxtap::cuda
