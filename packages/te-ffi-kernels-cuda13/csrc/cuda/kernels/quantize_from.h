// Quantization of a matrix that is computed on the way, by each kernel anew; but for sums over rows
// (quantize_sums_of.h).
#pragma once

#include "cuda/kernels/quantize_absmax.h"
#include "cuda/kernels/quantize_values.h"

namespace jaxtap::cuda {
namespace {

// With current scaling, the scale is made of the source's largest magnitude. The source's numbers
// must be rounded to `dtype` then, as if they had been stored before.
template <class Source>
void current_values_of(const Quantize& args, const Source& source, Stream stream) {
  // The bits of the largest magnitude, then the scale, then its inverse.
  auto* scale = static_cast<float*>(args.qvalues != nullptr ? args.scales : args.colwise_scales);
  quantize_clear(scale, 1, stream);
  Quantize search = args;
  search.qvalues = search.colwise = nullptr;
  search.updated_amax = scale;
  values_of(search, source, stream);
  quantize_current_scale(args, scale, stream);
  Quantize qvalues = args;
  qvalues.scale = scale;
  qvalues.updated_amax = nullptr;
  values_of(qvalues, source, stream);
  quantize_current_inverse(args, scale, stream);
}

template <class Source>
void quantize_from(const Quantize& args, const Source& source, Stream stream) {
  if (args.scaling == te::Scaling::kCurrentTensor) return current_values_of(args, source, stream);
  const bool channel = args.scaling == te::Scaling::kChannel;
  quantize_numbers(args, stream);
  if (channel) absmax_of(args, source, stream);
  values_of(args, source, stream);
  if (channel) quantize_scales(args, stream);
}

}  // namespace
}  // namespace jaxtap::cuda
