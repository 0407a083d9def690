// The gradients of gamma and beta: sums over rows. A block has 32 columns, and 32 threads for each,
// which have every 32nd row.
#include "cuda/formats.h"
#include "cuda/kernels/norm.h"

namespace jaxtap::cuda {
namespace {

constexpr int kSides = 32, kThreads = kSides * kSides;

struct Args {
  const void *dz, *x;
  const float *mean, *rsigma;  // no mean: nullptr
  void *dgamma, *dbeta;        // no beta: nullptr
  te::Float weights;
  int64_t rows, cols;
};

template <class Format>
__global__ void __launch_bounds__(kThreads) norm_gradient_weights_kernel(Args args) {
  __shared__ float products[kSides][kSides + 1], slopes[kSides][kSides + 1];
  const int across = threadIdx.x % kSides, down = threadIdx.x / kSides;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSides, col = first + across;
  const auto* dz = static_cast<const typename Format::Type*>(args.dz);
  const auto* x = static_cast<const typename Format::Type*>(args.x);
  const bool layer = args.mean != nullptr;
  float product = 0.0f, slope = 0.0f;
  if (col < args.cols) {
    for (int64_t row = down; row < args.rows; row += kSides) {
      const float mean = layer ? args.mean[row] : 0.0f;
      const float one = Format::load(dz[row * args.cols + col]);
      product += one * ((Format::load(x[row * args.cols + col]) - mean) * args.rsigma[row]);
      slope += one;
    }
  }
  products[across][down] = product;
  slopes[across][down] = slope;
  __syncthreads();
  // Each warp adds up a column.
  product = sum_of(products[down][across]);
  slope = sum_of(slopes[down][across]);
  if (across != 0 || first + down >= args.cols) return;
  store_one(args.weights, args.dgamma, first + down, product);
  if (layer) store_one(args.weights, args.dbeta, first + down, slope);
}

}  // namespace

void norm_gradient_weights(const NormGradient& given, Stream stream) {
  Args args = {};
  args.dz = given.dz;
  args.x = given.x;
  args.mean = given.kind == norms::Kind::kRms ? nullptr : given.mean;
  args.rsigma = given.rsigma;
  args.dgamma = given.dgamma;
  args.dbeta = given.dbeta;
  args.weights = given.weights;
  args.rows = given.rows;
  args.cols = given.cols;
  const int64_t blocks = ceil_of(args.cols, kSides);
  switch (given.dtype) {
    case te::Float::kF32:
      return launch(norm_gradient_weights_kernel<F32>, blocks, kThreads, stream, args);
    case te::Float::kBF16:
      return launch(norm_gradient_weights_kernel<BF16>, blocks, kThreads, stream, args);
    case te::Float::kF16:
      return launch(norm_gradient_weights_kernel<F16>, blocks, kThreads, stream, args);
  }
}

}  // namespace jaxtap::cuda
