#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {

void quantize(const Quantize& args, Stream stream) {
  const bool channel = args.scaling == te::Scaling::kChannel;
  quantize_numbers(args, stream);
  if (channel) quantize_absmax(args, stream);
  quantize_values(args, stream);
  if (channel) quantize_scales(args, stream);
  if (args.sums != nullptr) quantize_sums(args, stream);
}

}  // namespace jaxtap::cuda
