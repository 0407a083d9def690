#include "cuda/kernels/quantize_values.h"

namespace jaxtap::cuda {

void quantize_values(const Quantize& given, Stream stream) {
  of_array(given, [&](const auto& source) { values_of(given, source, stream); });
}

}  // namespace jaxtap::cuda
