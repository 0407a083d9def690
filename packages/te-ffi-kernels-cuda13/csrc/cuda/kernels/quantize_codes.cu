#include "cuda/kernels/quantize_codes.h"

namespace jaxtap::cuda {

void quantize_codes(const Quantize& given, Stream stream) {
  of_array(given, [&](const auto& source) { codes_of(given, source, stream); });
}

}  // namespace jaxtap::cuda
