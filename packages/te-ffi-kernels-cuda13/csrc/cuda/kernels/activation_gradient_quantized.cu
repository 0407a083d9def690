// Quantized values of activations' gradients, which are computed again by each kernel.
#include "cuda/kernels/activation_source.h"
#include "cuda/kernels/quantize_from.h"

namespace jaxtap::cuda {

void activation_gradient_quantized(const Activation& args, const Quantize& outputs, Stream stream) {
  const auto run = [&](const auto& source) { quantize_from(outputs, source, stream); };
  switch (args.dtype) {
    case te::Float::kF32: return backward_source<F32>(args, outputs, run);
    case te::Float::kBF16: return backward_source<BF16>(args, outputs, run);
    case te::Float::kF16: return backward_source<F16>(args, outputs, run);
  }
}

}  // namespace jaxtap::cuda
