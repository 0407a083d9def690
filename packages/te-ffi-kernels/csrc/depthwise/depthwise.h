// Depthwise convolutions of floats with packed integer weights.
#pragma once

#include "convolution/convolution.h"

namespace jaxtap::depthwise {

// y = sum of products * scale of the weight. The products of a window are added one after the other
// in float32, each with one rounding, and elements that lie in the padding are left out: equal bits
// on all instruction sets. `args` are those of convolution::convolve, without scales of x and y: the
// activations stay floats.
// Throws Error (invalid argument) for what does not fit.
void convolve(const convolution::Args& args, const Parallel& parallel, Isa isa);

}  // namespace jaxtap::depthwise
