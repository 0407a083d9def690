// The workspace of handlers whose kernels add up rows.

#pragma once

#include <algorithm>

#include "cuda/handlers/handler.h"
#include "cuda/kernels/column_sums.h"
#include "ffi/te_arguments.h"

namespace jaxtap::cuda {

// Memory for sums over rows of which there are `kinds` for each column; nullptr if none is needed.
inline float* PartsOfSums(const Call& call, int64_t rows, int64_t cols, int64_t kinds) {
  const Array workspace = call.Memory();
  const int64_t numbers = sum_numbers(rows, cols, kinds);
  // XLA's arrays have bytes.
  NeedSize(workspace, std::max<int64_t>(1, numbers * static_cast<int64_t>(sizeof(float))),
           "those of parts of sums");
  return numbers == 0 ? nullptr : static_cast<float*>(workspace.data);
}

}  // namespace jaxtap::cuda
