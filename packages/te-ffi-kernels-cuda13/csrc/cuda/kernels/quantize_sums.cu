#include "cuda/kernels/quantize_sums_of.h"

namespace jaxtap::cuda {

void quantize_sums(const Quantize& given, Stream stream) {
  of_array(given, [&](const auto& source) { sums_of(given, source, stream); });
}

}  // namespace jaxtap::cuda
