// Activations of the rows of a matrix, plain or gated, and their gradients, as
// activations/activations.h has them for the CPU.
#pragma once

#include <cstdint>

#include "activations/table.h"
#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {

// Arrays of the device.
struct Activation {
  activations::Function function = activations::Function::kGelu;
  bool gated = false;
  activations::Params params;
  const void* dz = nullptr;  // [rows, cols]; gradients alone
  const void* x = nullptr;   // [rows, cols], or gated [rows, 2, cols]
  te::Float dtype = te::Float::kF32;
  int64_t rows = 0, cols = 0;
};

// f(x), or f(a) * b where x is gated; and dx, in the shape of x, whose sums over rows `outputs` may
// have. As numbers or as quantized values: where `outputs` has it, whose x is not read.
void activation_forward(const Activation& args, const Quantize& outputs, Stream stream);
void activation_backward(const Activation& args, const Quantize& outputs, Stream stream);

// The kernels of numbers.
void activation_float(const Activation& args, const Quantize& outputs, Stream stream);
void activation_gradient_float(const Activation& args, const Quantize& outputs, Stream stream);

}  // namespace jaxtap::cuda
