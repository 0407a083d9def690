// Softmax of rows and its gradient, as softmax/softmax.h has them for the CPU.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"
#include "te/modes.h"

namespace jaxtap::cuda {

// [batch, heads, q, k]; with `causal` row i has the columns 0 to i, and the others are zeros.
struct SoftmaxShape {
  int64_t batch = 0, heads = 1, q = 0, k = 0;
  te::Float dtype = te::Float::kF32;
  bool causal = false;
};

struct SoftmaxForward {
  SoftmaxShape shape;
  float scale = 1.0f;
  const void* x = nullptr;
  // [masks, 1, q, k], where 1 leaves out; batch b has mask b % masks.
  const uint8_t* mask = nullptr;
  int64_t masks = 1;
  void* out = nullptr;
};

struct SoftmaxBackward {
  SoftmaxShape shape;
  float scale = 1.0f;
  const void* grad = nullptr;
  const void* softmax = nullptr;
  void* out = nullptr;
};

void softmax_forward(const SoftmaxForward& args, Stream stream);
void softmax_backward(const SoftmaxBackward& args, Stream stream);

// Rows of up to this many numbers are each in the registers of one warp.
constexpr int64_t kSoftmaxOfWarp = 1024;

void softmax_forward_of_warps(const SoftmaxForward& args, Stream stream);
void softmax_forward_of_blocks(const SoftmaxForward& args, Stream stream);
void softmax_backward_of_warps(const SoftmaxBackward& args, Stream stream);
void softmax_backward_of_blocks(const SoftmaxBackward& args, Stream stream);

}  // namespace jaxtap::cuda
