#include "cuda/kernels/column_sums_of.h"

#include <algorithm>

namespace jaxtap::cuda {
namespace {

// Blocks that keep a large GPU busy: two for each of its processors, twice over.
constexpr int64_t kManyBlocks = 512;
constexpr int64_t kLeastRows = 256;  // of a part: eight for each thread

// Rows are parts, and columns those of all sums.
struct Parts {
  static constexpr int kKinds = 1;
  const float* numbers;
  int64_t cols;

  __device__ __forceinline__ void add(int64_t row, int64_t col, float (&sums)[1]) const {
    sums[0] += numbers[row * cols + col];
  }
};

}  // namespace

SumParts sum_parts(int64_t rows, int64_t cols) {
  const int64_t across = std::max<int64_t>(1, ceil_of(cols, kSumSides));
  const int64_t most = std::max<int64_t>(1, rows / kLeastRows);
  const int64_t wanted = std::min(most, ceil_of(kManyBlocks, across));
  const int64_t each = ceil_of(ceil_of(rows, wanted), kSumSides) * kSumSides;
  return {each == 0 ? 1 : ceil_of(rows, each), each};
}

int64_t sum_numbers(int64_t rows, int64_t cols, int64_t kinds) {
  const int64_t count = sum_parts(rows, cols).count;
  return count == 1 ? 0 : count * kinds * cols;
}

void add_up_parts(const ColumnSums& sums, int64_t kinds, Stream stream) {
  const SumParts parts = sum_parts(sums.rows, sums.cols);
  ColumnArgs<Parts> args = {sums, {sums.parts, kinds * sums.cols}};
  args.rows = parts.count;
  args.cols = kinds * sums.cols;
  args.width = sums.cols;
  run_column_sums(args, {1, parts.count}, stream);
}

}  // namespace jaxtap::cuda
