// What calls of norm_forward and norm_backward are given, checked, whatever platform they run on.

#pragma once

#include <cstdint>

#include "ffi/attributes.h"
#include "ffi/te_outputs_call.h"
#include "norms/norm.h"

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

template <class Attributes>
NormForwardConfig NormForwardConfigOf(const Attributes& attributes) {
  return {NeedAttribute<int64_t>(attributes, "norm_type"),
          NeedAttribute<bool>(attributes, "zero_centered_gamma"),
          NeedAttribute<double>(attributes, "epsilon"),
          NeedAttribute<int64_t>(attributes, "scaling_mode"),
          NeedAttribute<int64_t>(attributes, "quantize_layout"),
          NeedAttribute<bool>(attributes, "output_amax_when_no_scaling")};
}

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

  // Of what is checked.
  norms::Norm Args(const NormForwardConfig& config, const Matrix& matrix) const {
    norms::Norm norm;
    norm.kind = config.kind;
    norm.zero_centered = config.zero_centered;
    norm.epsilon = config.epsilon;
    norm.x = x.data;
    norm.dtype = te::float_of(x.dtype);
    norm.gamma = gamma.data;
    norm.beta = beta.data;
    norm.weights = te::float_of(gamma.dtype);
    norm.rows = matrix.rows;
    norm.cols = matrix.cols;
    if (config.kind == norms::Kind::kLayer) norm.mean = static_cast<float*>(mu.data);
    norm.rsigma = static_cast<float*>(rsigma.data);
    return norm;
  }
};

struct NormBackwardCall {
  Array dz, x, mu, rsigma, gamma;
  Array dx, dgamma, dbeta;

  // Checks, and returns what the kernels get.
  norms::Gradient Args(norms::Kind kind, bool zero_centered) const {
    const Matrix matrix = NormRows(x, gamma);
    NeedSize(dz.NeedDtype({x.dtype}), x.size(), "one for each number of x");
    NeedSize(dx.NeedDtype({x.dtype}), x.size(), "one for each number of x");
    NeedSize(rsigma.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
    NeedSize(dgamma.NeedDtype({gamma.dtype}), matrix.cols, "one for each column of x");
    if (kind == norms::Kind::kLayer) {
      NeedSize(mu.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
      NeedSize(dbeta.NeedDtype({gamma.dtype}), matrix.cols, "one for each column of x");
    }
    norms::Gradient args;
    args.kind = kind;
    args.zero_centered = zero_centered;
    args.dz = dz.data;
    args.x = x.data;
    args.dtype = te::float_of(x.dtype);
    if (kind == norms::Kind::kLayer) args.mean = static_cast<const float*>(mu.data);
    args.rsigma = static_cast<const float*>(rsigma.data);
    args.gamma = gamma.data;
    args.weights = te::float_of(gamma.dtype);
    args.rows = matrix.rows;
    args.cols = matrix.cols;
    args.dx = dx.data;
    args.dgamma = dgamma.data;
    args.dbeta = dbeta.data;
    return args;
  }
};

}  // namespace jaxtap::ffi
