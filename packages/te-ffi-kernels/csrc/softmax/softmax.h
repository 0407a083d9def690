// Softmax of rows, of scaled logits: all of them, those that a mask leaves, or those up to the
// diagonal.
#pragma once

#include <cstdint>

#include "common/forward.h"
#include "te/modes.h"

namespace jaxtap::softmax {

// [batch, heads, q, k] of a dtype. Rows of different heads share a row of the mask.
struct Shape {
  int64_t batch = 0, heads = 1, q = 0, k = 0;
  te::Float dtype = te::Float::kF32;
  // Row i has the columns 0 to i alone, as torch.tril: the others aren't read, and are zeros.
  bool causal = false;

  int64_t rows() const { return batch * heads * q; }
};

struct Forward {
  Shape shape;
  float scale = 1.0f;
  const void* x = nullptr;
  // [masks, 1, q, k], where 1 means left out. Batch b has mask b % masks. A row without anything
  // left is zeros.
  const uint8_t* mask = nullptr;
  int64_t masks = 1;
  void* out = nullptr;
};

// In float32, rounded at the end. NaN or +infinity anywhere in a row that isn't left out makes it
// NaN.
void forward(const Forward& args, const Parallel& parallel);

struct Backward {
  Shape shape;
  float scale = 1.0f;
  const void* grad = nullptr;     // of the result
  const void* softmax = nullptr;  // the result
  void* out = nullptr;            // gradient of the logits
};

void backward(const Backward& args, const Parallel& parallel);

}  // namespace jaxtap::softmax
