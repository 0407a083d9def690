// What calls of norm_forward and norm_backward are given, checked, whatever platform they run on.
// sm_margin, an attribute of Transformer Engine's, is not used.

#pragma once

#include <cstdint>

#include "ffi/attributes.h"
#include "ffi/te_outputs_call.h"
#include "norms/norm.h"

namespace jaxtap::ffi {

struct NormConfig {
  template <class Attributes>
  explicit NormConfig(const Attributes& attributes)
      : kind(norms::kind_of(NeedAttribute<int64_t>(attributes, "norm_type"))),
        zero_centered(NeedAttribute<bool>(attributes, "zero_centered_gamma")) {}

  bool is_layer() const { return kind == norms::Kind::kLayer; }

  norms::Kind kind;
  bool zero_centered;
};

struct NormForwardConfig : NormConfig {
  template <class Attributes>
  explicit NormForwardConfig(const Attributes& attributes)
      : NormConfig(attributes),
        epsilon(NeedAttribute<double>(attributes, "epsilon")),
        output(NeedAttribute<int64_t>(attributes, "scaling_mode"),
               NeedAttribute<int64_t>(attributes, "quantize_layout"),
               NeedAttribute<bool>(attributes, "output_amax_when_no_scaling")) {
    if (!(epsilon >= 0.0)) {
      throw invalid_argument("epsilon must be 0 or more, got ", epsilon);
    }
  }

  double epsilon;
  OutputConfig output;
};

// Rows of gamma's size.
inline Matrix NormRows(const Array& x, const Array& gamma) {
  NeedFloat(x);
  if (x.rank() < 1) throw invalid_argument("x must have an axis, got ", x.Text());
  const int64_t cols = x.shape[static_cast<size_t>(x.rank() - 1)];
  gamma.NeedDtype({x.dtype, DType::F32});
  NeedSize(gamma, cols, "one for each column of x");
  return {x.Product(0, x.rank() - 1), cols, x.rank() - 1};
}

struct NormForwardCall {
  static constexpr char kTarget[] = "te_ffi_kernels.norm_forward";
  using Config = NormForwardConfig;

  // The last result is a workspace, for platforms that use it.
  template <class Call>
  explicit NormForwardCall(const Call& call)
      : config(ConfigOf<Config>(call, 5, 8)),
        x(call.Operand(0, "x")),
        gamma(call.Operand(3, "gamma")),
        outputs(call, config.output, 1, x.dtype, NormRows(x, gamma)),
        mu(call.Result(5, "mu")) {
    const Array beta = call.Operand(4, "beta"), rsigma = call.Result(6, "rsigma");
    const auto& [rows, cols, axis] = outputs.matrix;
    if (config.is_layer()) {
      NeedSize(beta.NeedDtype({gamma.dtype}), cols, "one for each column of x");
      NeedSize(mu.NeedDtype({DType::F32}), rows, "one for each row of x");
      args.mean = static_cast<float*>(mu.data);
    }
    NeedSize(rsigma.NeedDtype({DType::F32}), rows, "one for each row of x");
    args.kind = config.kind;
    args.zero_centered = config.zero_centered;
    args.epsilon = static_cast<float>(config.epsilon);
    args.x = x.data;
    args.dtype = te::float_of(x.dtype);
    args.gamma = gamma.data;
    args.beta = beta.data;
    args.weights = te::float_of(gamma.dtype);
    args.rows = rows;
    args.cols = cols;
    args.rsigma = static_cast<float*>(rsigma.data);
  }

  Config config;
  Array x, gamma;
  Outputs outputs;
  Array mu;  // zeros for RMS
  norms::Norm args;
};

struct NormBackwardCall {
  static constexpr char kTarget[] = "te_ffi_kernels.norm_backward";
  using Config = NormConfig;

  // The last result is a workspace, which isn't used.
  template <class Call>
  explicit NormBackwardCall(const Call& call)
      : config(ConfigOf<Config>(call, 5, 4)), dbeta(call.Result(2, "dbeta")) {
    const Array dz = call.Operand(0, "dz"), x = call.Operand(1, "x");
    const Array mu = call.Operand(2, "mu"), rsigma = call.Operand(3, "rsigma");
    const Array gamma = call.Operand(4, "gamma");
    const Array dx = call.Result(0, "dx"), dgamma = call.Result(1, "dgamma");
    const Matrix matrix = NormRows(x, gamma);
    NeedSize(dz.NeedDtype({x.dtype}), x.size(), "one for each number of x");
    NeedSize(dx.NeedDtype({x.dtype}), x.size(), "one for each number of x");
    NeedSize(rsigma.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
    NeedSize(dgamma.NeedDtype({gamma.dtype}), matrix.cols, "one for each column of x");
    if (config.is_layer()) {
      NeedSize(mu.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
      NeedSize(dbeta.NeedDtype({gamma.dtype}), matrix.cols, "one for each column of x");
      args.mean = static_cast<const float*>(mu.data);
    }
    args.kind = config.kind;
    args.zero_centered = config.zero_centered;
    args.dz = dz.data;
    args.x = x.data;
    args.dtype = te::float_of(x.dtype);
    args.rsigma = static_cast<const float*>(rsigma.data);
    args.gamma = gamma.data;
    args.weights = te::float_of(gamma.dtype);
    args.rows = matrix.rows;
    args.cols = matrix.cols;
    args.dx = dx.data;
    args.dgamma = dgamma.data;
    args.dbeta = dbeta.data;
  }

  Config config;
  Array dbeta;  // zeros for RMS
  norms::Gradient args;
};

}  // namespace jaxtap::ffi
