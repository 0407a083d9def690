// Layer norm and RMS norm of the rows of a matrix, and their gradients, as norms/norms.h has them
// for the CPU.
#pragma once

#include <cstdint>

#include "cuda/kernels/quantize.h"
#include "norms/norm.h"

namespace jaxtap::cuda {

// Arrays of the device.
struct Norm : norms::Norm {
  // What rounding took from the mean, [rows]; nullptr for RMS, or where nothing is quantized.
  float* rest = nullptr;
};
struct NormGradient : norms::Gradient {
  float* parts = nullptr;  // memory for sums of two kinds: see column_sums.h
};

// (x - mean) * rsigma * gamma + beta, as numbers or as quantized values: where `outputs` has it,
// whose x is not read. Sums are in an order that depends on the shape alone, not even on dtypes.
void norm_forward(const Norm& norm, const Quantize& outputs, Stream stream);
void norm_backward(const NormGradient& args, Stream stream);

// The kernels. Rows of up to this many numbers are each in the registers of one warp, or of one
// block; longer ones are read several times.
constexpr int64_t kNormOfWarp = 1024, kNormOfBlock = 8192;

// Means and inverse roots; where `outputs` isn't quantized, the numbers as well.
void norm_rows(const Norm& norm, const Quantize& outputs, Stream stream);
void norm_gradient_rows(const NormGradient& args, Stream stream);
void norm_gradient_weights(const NormGradient& args, Stream stream);

}  // namespace jaxtap::cuda
