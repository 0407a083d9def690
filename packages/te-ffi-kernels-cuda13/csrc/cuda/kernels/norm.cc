#include "cuda/kernels/norm.h"

namespace jaxtap::cuda {

void norm_forward(const Norm& norm, const Quantize& outputs, Stream stream) {
  const bool quantizes = outputs.scaling != te::Scaling::kNone;
  if (!quantizes) quantize_numbers(outputs, stream);
  norm_rows(norm, outputs, stream);
  if (quantizes) norm_values(norm, outputs, stream);
}

void norm_backward(const NormGradient& args, Stream stream) {
  norm_gradient_rows(args, stream);
  norm_gradient_weights(args, stream);
}

}  // namespace jaxtap::cuda
