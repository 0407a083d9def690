// The results of operations that quantize what they compute, on CPU.

#pragma once

#include <cstring>
#include <vector>

#include "ffi/te_outputs_call.h"
#include "te/quantize.h"

namespace jaxtap::ffi {

// Zeros for results that aren't wanted.
inline void Clear(const std::vector<Array>& arrays) {
  for (const Array& array : arrays) {
    const size_t bytes = static_cast<size_t>(array.size()) * byte_size(array.dtype);
    if (bytes != 0) std::memset(array.data, 0, bytes);
  }
}

// Sets the inverse of a tensor's scale, where quantized values go with it.
inline void SetInverses(const te::Quantize& args) {
  for (void* scales : {args.scales, args.colwise_scales}) {
    if (scales != nullptr) *static_cast<float*>(scales) = 1.0f / args.scale;
  }
}

// `sums` is for those over rows, in the dtype of the outputs, or nullptr.
inline void RunOutputs(const Outputs& outputs, const te::Source& source, void* sums,
                       const Parallel& parallel) {
  const OutputConfig& config = outputs.config;
  const bool tensor = te::is_tensor(config.scaling);
  const bool current = config.scaling == te::Scaling::kCurrentTensor;
  te::Quantize args;
  args.source = &source;
  args.dtype = te::float_of(outputs.dtype);
  args.rows = outputs.matrix.rows;
  args.cols = outputs.matrix.cols;
  args.scaling = config.scaling;
  // It may be the same memory as the result.
  const float before = *static_cast<const float*>(outputs.amax.data);
  float found = 0.0f;
  Clear(outputs.Unwanted());
  if (!config.quantizes()) {
    args.out = outputs.out.data;
    args.wants_absmax = config.wants_absmax;
  } else {
    args.qtype = outputs.QType(config.layout);
    if (current) {
      // What is quantized are numbers of the dtype, as if they had been stored before.
      args.rounded = true;
      args.wants_absmax = true;
      found = te::quantize(args, parallel);
      args.scale = te::tensor_scale(found, args.qtype);
    } else if (tensor) {
      args.scale = *static_cast<const float*>(outputs.scale.data);
    }
    outputs.Direct(config.layout, args);
    if (tensor) SetInverses(args);
    args.wants_absmax = tensor && !current;
  }
  args.sums = sums;
  const float most = te::quantize(args, parallel);
  if (!current) found = most;
  const bool updates = tensor || config.wants_absmax;
  *static_cast<float*>(outputs.updated_amax.data) = updates && !(before >= found) ? found : before;
}

}  // namespace jaxtap::ffi
