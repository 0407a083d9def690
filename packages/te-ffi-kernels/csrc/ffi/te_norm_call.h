// What calls of norm_forward and norm_backward are given, checked, whatever platform they run on.

#pragma once

#include <cstdint>

#include "ffi/te_outputs_call.h"
#include "norms/kind.h"

namespace jaxtap::ffi {

struct NormForwardConfig {
  NormForwardConfig(int64_t norm_type, bool zero_centered_gamma, double given_epsilon,
                    int64_t scaling_mode, int64_t quantize_layout, bool output_amax_when_no_scaling)
      : kind(norms::kind_of(norm_type)),
        zero_centered(zero_centered_gamma),
        epsilon(static_cast<float>(given_epsilon)),
        output(scaling_mode, quantize_layout, output_amax_when_no_scaling) {
    if (!(given_epsilon >= 0.0)) {
      throw invalid_argument("epsilon is ", given_epsilon, ", and must be 0 or more");
    }
  }

  norms::Kind kind;
  bool zero_centered;
  float epsilon;
  OutputConfig output;
};

// Rows of gamma's size.
inline Matrix NormRows(const Array& x, const Array& gamma) {
  NeedFloat(x);
  if (x.rank() < 1) throw invalid_argument("x is ", x.Text(), ", and must have an axis");
  const int64_t cols = x.shape[static_cast<size_t>(x.rank() - 1)];
  gamma.NeedDtype({x.dtype, DType::F32});
  NeedSize(gamma, cols, "one for each column of x");
  return {x.Product(0, x.rank() - 1), cols, x.rank() - 1};
}

struct NormForwardCall {
  Array x, scale, amax, gamma, beta;
  Outputs outputs;
  Array mu, rsigma;

  Matrix Check(const NormForwardConfig& config) const {
    const Matrix matrix = NormRows(x, gamma);
    if (config.kind == norms::Kind::kLayer) {
      NeedSize(beta.NeedDtype({gamma.dtype}), matrix.cols, "one for each column of x");
      NeedSize(mu.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
    }
    NeedSize(rsigma.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
    CheckOutputs(config.output, x, matrix, scale, amax, outputs);
    return matrix;
  }
};

struct NormBackwardCall {
  Array dz, x, mu, rsigma, gamma;
  Array dx, dgamma, dbeta;

  Matrix Check(norms::Kind kind) const {
    const Matrix matrix = NormRows(x, gamma);
    NeedSize(dz.NeedDtype({x.dtype}), x.size(), "one for each number of x");
    NeedSize(dx.NeedDtype({x.dtype}), x.size(), "one for each number of x");
    NeedSize(rsigma.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
    NeedSize(dgamma.NeedDtype({gamma.dtype}), matrix.cols, "one for each column of x");
    if (kind == norms::Kind::kLayer) {
      NeedSize(mu.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
      NeedSize(dbeta.NeedDtype({gamma.dtype}), matrix.cols, "one for each column of x");
    }
    return matrix;
  }
};

}  // namespace jaxtap::ffi
