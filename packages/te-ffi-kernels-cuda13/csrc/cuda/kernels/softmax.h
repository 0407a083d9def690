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

// Rows of up to this many numbers are each in the registers of one warp.
constexpr int64_t kSoftmaxOfWarp = 1024;

void softmax_forward_of_warps(const SoftmaxForward& args, Stream stream);
void softmax_forward_of_blocks(const SoftmaxForward& args, Stream stream);
void softmax_backward_of_warps(const SoftmaxBackward& args, Stream stream);
void softmax_backward_of_blocks(const SoftmaxBackward& args, Stream stream);

}  // namespace jaxtap::cuda
