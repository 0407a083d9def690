// Softmax of rows and its gradient, as softmax/softmax.h has them for the CPU.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"
#include "softmax/softmax.h"

namespace jaxtap::cuda {

// With arrays of the device.
using SoftmaxShape = softmax::Shape;
using SoftmaxForward = softmax::Forward;
using SoftmaxBackward = softmax::Backward;

void softmax_forward(const SoftmaxForward& args, Stream stream);
void softmax_backward(const SoftmaxBackward& args, Stream stream);

}  // namespace jaxtap::cuda
