// Quantized values and scales back to numbers.
#pragma once

#include "cuda/runtime.h"
#include "te/dequantize.h"

namespace jaxtap::cuda {

using te::Dequantize;  // with arrays of the device

void dequantize(const Dequantize& args, Stream stream);

}  // namespace jaxtap::cuda
