#include "cuda/kernels/quantize_absmax.h"

namespace jaxtap::cuda {

void quantize_absmax(const Quantize& given, Stream stream) {
  of_array(given, [&](const auto& source) { absmax_of(given, source, stream); });
}

}  // namespace jaxtap::cuda
