// Sums over rows. A block has 32 columns, and 32 threads for each, which have every 32nd row.
#pragma once

#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

constexpr int kSumSides = 32, kSumThreads = kSumSides * kSumSides;

template <class Source>
struct SumsOf : TileArgs {
  Source source;
  void* sums;
};

template <class Source>
__global__ void __launch_bounds__(kSumThreads) quantize_sums_kernel(SumsOf<Source> args) {
  using Format = typename Source::Format;
  __shared__ float parts[kSumSides][kSumSides + 1];
  const int across = threadIdx.x % kSumSides, down = threadIdx.x / kSumSides;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSumSides;
  float sum = 0.0f;
  if (first + across < args.cols) {
    for (int64_t row = down; row < args.rows; row += kSumSides) {
      sum += args.source.number(args, row, first + across);
    }
  }
  parts[across][down] = sum;
  __syncthreads();
  // Each warp adds up a column.
  const float total = sum_of(parts[down][across]);
  if (across == 0 && first + down < args.cols) {
    static_cast<typename Format::Type*>(args.sums)[first + down] = Format::store(total);
  }
}

template <class Source>
void sums_of(const Quantize& given, const Source& source, Stream stream) {
  SumsOf<Source> args = {};
  args.rows = given.rows;
  args.cols = given.cols;
  args.source = source;
  args.sums = given.sums;
  launch(quantize_sums_kernel<Source>, ceil_of(args.cols, kSumSides), kSumThreads, stream, args);
}

}  // namespace
}  // namespace jaxtap::cuda
