// Gamma and beta as kernels read them.
#pragma once

#include "cuda/formats.h"
#include "cuda/kernels/norm.h"

namespace jaxtap::cuda {
namespace {

struct NormWeights {
  const void* at;  // nullptr where there is none
  te::Float dtype;
  float offset;

  // Whether vectors of `count` of them may be read.
  bool wide(int count) const {
    const size_t bytes = dtype == te::Float::kF32 ? 4 : 2;
    return aligned(alignment_of(bytes * static_cast<size_t>(count)), static_cast<const char*>(at));
  }

  // Those of kCount columns from `col` on, of which there are `left`; zeros beyond them.
  template <int kCount>
  __device__ __forceinline__ void read_at(int64_t col, int64_t left, bool wide,
                                          float (&out)[kCount]) const {
    switch (dtype) {
      case te::Float::kF32:
        load<F32>(static_cast<const float*>(at) + col, left, wide, out);
        break;
      case te::Float::kBF16:
        load<BF16>(static_cast<const uint16_t*>(at) + col, left, wide, out);
        break;
      case te::Float::kF16:
        load<F16>(static_cast<const uint16_t*>(at) + col, left, wide, out);
        break;
      default:
        __builtin_unreachable();
    }
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) out[i] += offset;
  }
};

template <class Given>
NormWeights gamma_of(const Given& given) {
  return {given.gamma, given.weights, given.zero_centered ? 1.0f : 0.0f};
}

// Of what `mean` and `rest` add up to.
JAXTAP_DEVICE float normalized(float x, float mean, float rest, float rsigma, float gamma,
                               float beta, bool has_beta) {
  const float product = (x - mean - rest) * rsigma * gamma;
  return has_beta ? product + beta : product;
}

}  // namespace
}  // namespace jaxtap::cuda
