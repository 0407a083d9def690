// Quantized values of activations and of their gradients, and sums of these over rows: what is
// quantized or summed is computed again by each kernel.
#include "cuda/kernels/activation_source.h"
#include "cuda/kernels/quantize_from.h"
#include "cuda/kernels/quantize_sums_of.h"

namespace jaxtap::cuda {

void activation_forward(const Activation& args, const Quantize& outputs, Stream stream) {
  if (outputs.scaling == te::Scaling::kNone) {
    quantize_numbers(outputs, stream);
    return activation_float(args, outputs, stream);
  }
  const auto run = [&](const auto& source) { quantize_from(outputs, source, stream); };
  by_float(args.dtype, [&](auto of) { forward_source<decltype(of)>(args, outputs, run); });
}

void activation_backward(const Activation& args, const Quantize& outputs, Stream stream) {
  const bool quantizes = outputs.scaling != te::Scaling::kNone;
  if (!quantizes) {
    quantize_numbers(outputs, stream);
    activation_gradient_float(args, outputs, stream);
  }
  const auto run = [&](const auto& source) {
    if (quantizes) quantize_from(outputs, source, stream);
    if (outputs.sums != nullptr) sums_of(outputs, source, stream);
  };
  by_float(args.dtype, [&](auto of) { backward_source<decltype(of)>(args, outputs, run); });
}

}  // namespace jaxtap::cuda
