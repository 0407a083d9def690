// Where the results of a matmul go.
#pragma once

#include "matmul/kernels.h"
#include "matmul/matmul.h"

namespace jaxtap {

// Of `columns` columns from a row and column on.
inline Output output_of(const Matmul& args, int64_t row, int64_t column, int64_t columns) {
  const int64_t size = static_cast<int64_t>(byte_size(args.y_dtype)), n = args.weights.n;
  const int64_t at = (row * n + column) * size;
  const auto from = [](const void* numbers, int64_t bytes) {
    return numbers == nullptr ? nullptr : static_cast<const uint8_t*>(numbers) + bytes;
  };
  return {static_cast<uint8_t*>(args.y) + at, args.y_dtype, n * size, columns,
          from(args.bias, column * size), from(args.residual, at),
          args.clamps, args.least, args.most};
}

}  // namespace jaxtap
