// What calls of act_lu and dact_dbias_quantize are given, checked, whatever platform they run on.

#pragma once

#include <cstdint>

#include "activations/activation.h"
#include "ffi/attributes.h"
#include "ffi/te_outputs_call.h"

namespace jaxtap::ffi {

template <typename T, class Attributes>
T ActivationMember(const Attributes& dictionary, const char* name) {
  const auto value = dictionary.template get<T>(name);
  if (value.has_value()) return *value;
  throw invalid_argument("act_params has no member ", name, ", or one of another type than it ",
                         "must have: {clamped_swiglu: {limit, alpha, glu_linear_offset}}, of f32");
}

template <class Attributes>
activations::Params ActivationParamsOf(const Attributes& act_params) {
  const auto clamped = ActivationMember<Attributes>(act_params, "clamped_swiglu");
  const activations::Params params = {ActivationMember<float>(clamped, "limit"),
                                      ActivationMember<float>(clamped, "alpha"),
                                      ActivationMember<float>(clamped, "glu_linear_offset")};
  if (!(params.limit >= 0.0f)) {
    throw invalid_argument("the limit of act_params must be 0 or more, got ", params.limit);
  }
  return params;
}

struct ActivationConfig {
  template <class Attributes>
  explicit ActivationConfig(const Attributes& attributes)
      : activation(activations::activation_of(NeedAttribute<int64_t>(attributes, "act_enum"))),
        params(ActivationParamsOf(NeedAttribute<Attributes>(attributes, "act_params"))),
        output(NeedAttribute<int64_t>(attributes, "scaling_mode"),
               NeedAttribute<int64_t>(attributes, "quantize_layout"),
               NeedAttribute<bool>(attributes, "output_amax_when_no_scaling")) {}

  int64_t parts() const { return activation.gated ? 2 : 1; }

  activations::Activation activation;
  activations::Params params;
  OutputConfig output;
};

struct ActivationGradientConfig : ActivationConfig {
  template <class Attributes>
  explicit ActivationGradientConfig(const Attributes& attributes)
      : ActivationConfig(attributes), is_dbias(NeedAttribute<bool>(attributes, "is_dbias")) {}

  bool is_dbias;
};

// [rows, columns of one part].
inline Matrix ActivationRows(const ActivationConfig& config, const Array& x) {
  NeedFloat(x);
  const int64_t rank = x.rank();
  if (rank < 2 || x.shape[static_cast<size_t>(rank - 2)] != config.parts()) {
    throw invalid_argument("the last axis but one of x must be ", config.parts(),
                           ", as act_enum has it, got ", x.Text());
  }
  return {x.Product(0, rank - 2), x.shape[static_cast<size_t>(rank - 1)], rank - 2};
}

struct ActivationCall {
  static constexpr char kTarget[] = "te_ffi_kernels.act_lu";
  using Config = ActivationConfig;

  template <class Call>
  explicit ActivationCall(const Call& call)
      : config(ConfigOf<Config>(call, 3, 5)),
        x(call.Operand(0, "x")),
        rows(ActivationRows(config, x)),
        outputs(call, config.output, 1, x.dtype, rows) {}

  Config config;
  Array x;
  Matrix rows;
  Outputs outputs;
};

struct ActivationGradientCall {
  static constexpr char kTarget[] = "te_ffi_kernels.dact_dbias_quantize";
  using Config = ActivationGradientConfig;

  // The last result is a workspace, which isn't used.
  template <class Call>
  explicit ActivationGradientCall(const Call& call)
      : config(ConfigOf<Config>(call, 4, 7)),
        dz(call.Operand(0, "dz")),
        x(call.Operand(1, "x")),
        rows(ActivationRows(config, x)),
        outputs(call, config.output, 2, x.dtype,
                {rows.rows, config.parts() * rows.cols, rows.axis}),
        dbias(call.Result(5, "dbias")) {
    NeedSize(dz.NeedDtype({x.dtype}), rows.rows * rows.cols,
             "one for each result of the activation");
    if (config.is_dbias) {
      NeedSize(dbias.NeedDtype({x.dtype}), outputs.matrix.cols, "one for each column of x");
    }
  }

  Config config;
  Array dz, x;
  Matrix rows;      // of dz
  Outputs outputs;  // of dx
  Array dbias;
};

}  // namespace jaxtap::ffi
