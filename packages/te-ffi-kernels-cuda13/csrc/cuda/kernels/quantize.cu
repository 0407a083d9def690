// Quantization of an array.
#include "cuda/kernels/quantize_from.h"
#include "cuda/kernels/quantize_sums_of.h"

namespace jaxtap::cuda {

void quantize(const Quantize& args, Stream stream) {
  of_array(args, [&](const auto& source) {
    quantize_from(args, source, stream);
    if (args.sums != nullptr) sums_of(args, source, stream);
  });
}

}  // namespace jaxtap::cuda
