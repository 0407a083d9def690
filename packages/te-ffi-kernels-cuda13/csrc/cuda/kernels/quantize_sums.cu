// Sums over rows. A block has 32 columns, and 32 threads for each, which have every 32nd row.
#include "cuda/formats.h"
#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {
namespace {

constexpr int kSides = 32, kThreads = kSides * kSides;

struct Args {
  const void* x;
  void* sums;
  int64_t rows, cols;
};

template <class Format>
__global__ void quantize_sums_kernel(Args args) {
  __shared__ float parts[kSides][kSides + 1];
  const int across = threadIdx.x % kSides, down = threadIdx.x / kSides;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSides;
  const auto* from = static_cast<const typename Format::Type*>(args.x);
  float sum = 0.0f;
  if (first + across < args.cols) {
    for (int64_t row = down; row < args.rows; row += kSides) {
      sum += Format::load(from[row * args.cols + first + across]);
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

}  // namespace

void quantize_sums(const Quantize& given, Stream stream) {
  const Args args = {given.x, given.sums, given.rows, given.cols};
  const int64_t blocks = ceil_of(args.cols, kSides);
  switch (given.dtype) {
    case te::Float::kF32:
      return launch(quantize_sums_kernel<F32>, blocks, kThreads, stream, args);
    case te::Float::kBF16:
      return launch(quantize_sums_kernel<BF16>, blocks, kThreads, stream, args);
    case te::Float::kF16:
      return launch(quantize_sums_kernel<F16>, blocks, kThreads, stream, args);
  }
}

}  // namespace jaxtap::cuda
