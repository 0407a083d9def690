// The gradients of gamma and beta: sums over rows.
#include "cuda/kernels/column_sums_of.h"
#include "cuda/kernels/norm.h"

namespace jaxtap::cuda {
namespace {

template <class Format>
struct Slopes {
  static constexpr int kKinds = 2;
  const typename Format::Type *dz, *x;
  const float *mean, *rsigma;  // no mean: nullptr
  int64_t cols;

  __device__ __forceinline__ void add(int64_t row, int64_t col, float (&sums)[2]) const {
    const float less = mean == nullptr ? 0.0f : mean[row];
    const float slope = Format::load(dz[row * cols + col]);
    sums[0] += slope * ((Format::load(x[row * cols + col]) - less) * rsigma[row]);
    sums[1] += slope;
  }
};

template <class Format>
void run(const NormGradient& given, Stream stream) {
  using Type = typename Format::Type;
  const bool layer = given.kind == norms::Kind::kLayer;
  const Slopes<Format> slopes = {static_cast<const Type*>(given.dz),
                                 static_cast<const Type*>(given.x), layer ? given.mean : nullptr,
                                 given.rsigma, given.cols};
  ColumnSums sums;
  sums.rows = given.rows;
  sums.cols = given.cols;
  sums.dtype = given.weights;
  sums.out[0] = given.dgamma;
  sums.out[1] = layer ? given.dbeta : nullptr;
  sums.parts = given.parts;
  column_sums(sums, slopes, stream);
}

}  // namespace

void norm_gradient_weights(const NormGradient& given, Stream stream) {
  by_float(given.dtype, [&](auto of) { run<decltype(of)>(given, stream); });
}

}  // namespace jaxtap::cuda
