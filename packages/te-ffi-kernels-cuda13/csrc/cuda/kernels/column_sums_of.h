// The kernel of both stages of sums over rows. A block has 32 columns, and 32 threads for each, which
// have every 32nd row.
#pragma once

#include "cuda/formats.h"
#include "cuda/kernels/column_sums.h"

namespace jaxtap::cuda {
namespace {

constexpr int kSumSides = 32, kSumThreads = kSumSides * kSumSides;

// A Source has
//   kKinds   how many sums a column has
//   add      adds to each what a row and column has
template <class Source>
struct ColumnArgs : ColumnSums {
  Source source;
  int64_t across = 0, rows_each = 0, count = 1;  // blocks for a row; rows of a part, and parts
  int64_t width = 0;                             // columns of `out`
};

template <class Source>
__global__ void __launch_bounds__(kSumThreads) column_sums_kernel(ColumnArgs<Source> args) {
  constexpr int kKinds = Source::kKinds;
  __shared__ float of_threads[kKinds][kSumSides][kSumSides + 1];
  const int across = threadIdx.x % kSumSides, down = threadIdx.x / kSumSides;
  const int64_t part = blockIdx.x / args.across;
  const int64_t first = blockIdx.x % args.across * kSumSides;
  const int64_t begin = part * args.rows_each, limit = begin + args.rows_each;
  const int64_t end = limit < args.rows ? limit : args.rows;
  float sums[kKinds] = {};
  if (first + across < args.cols) {
    for (int64_t row = begin + down; row < end; row += kSumSides) {
      args.source.add(row, first + across, sums);
    }
  }
  JAXTAP_UNROLL
  for (int kind = 0; kind < kKinds; ++kind) of_threads[kind][across][down] = sums[kind];
  __syncthreads();
  // Each warp adds up a column.
  JAXTAP_UNROLL
  for (int kind = 0; kind < kKinds; ++kind) {
    const float sum = sum_of(of_threads[kind][down][across]);
    if (across != 0 || first + down >= args.cols) continue;
    const int64_t at = kind * args.cols + first + down;
    if (args.count != 1) {
      args.parts[part * kKinds * args.cols + at] = sum;
    } else if (void* out = args.out[at / args.width]; out != nullptr) {
      store_one(args.dtype, out, at % args.width, sum);
    }
  }
}

template <class Source>
void run_column_sums(ColumnArgs<Source> args, const SumParts& parts, Stream stream) {
  args.across = ceil_of(args.cols, kSumSides);
  args.rows_each = parts.rows;
  args.count = parts.count;
  launch(column_sums_kernel<Source>, args.across * parts.count, kSumThreads, stream, args);
}

template <class Source>
void column_sums(const ColumnSums& sums, const Source& source, Stream stream) {
  if (sums.cols == 0) return;
  const SumParts parts = sum_parts(sums.rows, sums.cols);
  if (parts.count != 1 && sums.parts == nullptr) {
    throw failed_precondition("sums of ", parts.count, " parts have no memory");
  }
  ColumnArgs<Source> args = {sums, source};
  args.width = sums.cols;
  run_column_sums(args, parts, stream);
  if (parts.count != 1) add_up_parts(sums, Source::kKinds, stream);
}

}  // namespace
}  // namespace jaxtap::cuda
