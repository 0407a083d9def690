// Rows and columns out of packed weights, as floats.
#pragma once

#include <cstdint>

#include "matmul/matmul.h"

namespace jaxtap {

struct Take {
  PackedWeights weights;
  const int32_t* indices = nullptr;  // unaligned; negative from the end, clamped beyond the ends
  int64_t count = 0;
  bool columns = false;  // of columns: [count, k]; else of rows: [count, n]
  void* out = nullptr;   // unaligned
  DType dtype = DType::F32;
};

// value * scale in float32, rounded once to float32, bfloat16 or float16. Checks headers and
// payloads of the panels that it reads. Throws Error (invalid argument).
void take(const Take& args, const Parallel& parallel);

}  // namespace jaxtap
