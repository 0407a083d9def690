// Quantized values of normalized numbers, which are computed again by each kernel.
#include "cuda/kernels/norm_weights.h"
#include "cuda/kernels/quantize_from.h"

namespace jaxtap::cuda {
namespace {

template <class Of>
struct Normalized {
  using Format = Of;
  const typename Of::Type* x;
  NormWeights gamma, beta;
  const float *mean, *rest, *rsigma;
  bool rounded;  // to the dtype

  bool wide() const {
    return aligned(4 * sizeof(typename Of::Type), x) && gamma.wide(kPart) && beta.wide(kPart);
  }

  __device__ __forceinline__ void part(const TileArgs& args, const Place& place,
                                       float (&out)[kPart][kPart]) const {
    const bool layer = mean != nullptr;
    const int64_t left = args.cols - place.col;
    float factor[kPart], offset[kPart] = {};
    gamma.read_at(place.col, left, args.wide, factor);
    if (layer) beta.read_at(place.col, left, args.wide, offset);
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) {
      const int64_t row = place.row + i;
      const bool inside = row < args.rows;
      load<Of>(x + row * args.cols + place.col, inside ? left : 0, args.wide, out[i]);
      const float middle = inside && layer ? mean[row] : 0.0f;
      const float more = inside && layer ? rest[row] : 0.0f;
      const float by = inside ? rsigma[row] : 0.0f;
      JAXTAP_UNROLL
      for (int j = 0; j < kPart; ++j) {
        const float number = normalized(out[i][j], middle, more, by, factor[j], offset[j], layer);
        out[i][j] = !inside || j >= left ? 0.0f : rounded ? Of::load(Of::store(number)) : number;
      }
    }
  }
};

template <class Of>
void values_of_norm(const Norm& norm, const Quantize& outputs, Stream stream) {
  Normalized<Of> source = {};
  source.x = static_cast<const typename Of::Type*>(norm.x);
  source.gamma = gamma_of(norm);
  source.beta = {norm.kind == norms::Kind::kRms ? nullptr : norm.beta, norm.weights, 0.0f};
  source.mean = norm.mean;
  source.rest = norm.rest;
  source.rsigma = norm.rsigma;
  source.rounded = outputs.scaling == te::Scaling::kCurrentTensor;
  quantize_from(outputs, source, stream);
}

}  // namespace

void norm_forward(const Norm& norm, const Quantize& outputs, Stream stream) {
  const bool quantizes = outputs.scaling != te::Scaling::kNone;
  if (!quantizes) quantize_numbers(outputs, stream);
  norm_rows(norm, outputs, stream);
  if (!quantizes) return;
  by_float(norm.dtype, [&](auto of) { values_of_norm<decltype(of)>(norm, outputs, stream); });
}

}  // namespace jaxtap::cuda
