#include "cuda/kernels/activation.h"

namespace jaxtap::cuda {

void activation_forward(const Activation& args, const Quantize& outputs, Stream stream) {
  if (outputs.scaling != te::Scaling::kNone) return activation_quantized(args, outputs, stream);
  quantize_numbers(outputs, stream);
  activation_float(args, outputs, stream);
}

void activation_backward(const Activation& args, const Quantize& outputs, Stream stream) {
  if (outputs.scaling != te::Scaling::kNone) {
    activation_gradient_quantized(args, outputs, stream);
  } else {
    quantize_numbers(outputs, stream);
    activation_gradient_float(args, outputs, stream);
  }
  if (outputs.sums != nullptr) activation_gradient_sums(args, outputs, stream);
}

}  // namespace jaxtap::cuda
