// What calls of dbias_quantize and grouped_quantize are given, checked, whatever platform they run
// on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_outputs_call.h"

namespace jaxtap::ffi {

// Of both.
struct GroupedConfig {
  template <class Attributes>
  explicit GroupedConfig(const Attributes& attributes)
      : scaling(QuantizedScaling(NeedAttribute<int64_t>(attributes, "scaling_mode"))),
        layout(te::layout_of(NeedAttribute<int64_t>(attributes, "q_layout"))),
        flatten_axis(NeedAttribute<int64_t>(attributes, "flatten_axis")) {}

  bool rowwise() const { return te::has_rowwise(layout); }
  bool colwise() const { return te::has_colwise(layout); }

  te::Scaling scaling;
  te::Layout layout;
  int64_t flatten_axis;
};

struct QuantizeConfig : GroupedConfig {
  template <class Attributes>
  explicit QuantizeConfig(const Attributes& attributes)
      : GroupedConfig(attributes), is_dbias(NeedAttribute<bool>(attributes, "is_dbias")) {
    if (NeedAttribute<bool>(attributes, "stochastic_rounding")) {
      throw invalid_argument("stochastic_rounding must be false, got true. It is for NVFP4, which "
                             "no kernel has.");
    }
    if (NeedAttribute<bool>(attributes, "use_rht")) {
      throw invalid_argument("use_rht must be false, got true. Random Hadamard transforms are for "
                             "NVFP4, which no kernel has.");
    }
  }

  bool is_dbias;
};

struct QuantizeCall {
  static constexpr char kTarget[] = "te_ffi_kernels.dbias_quantize";
  using Config = QuantizeConfig;

  // Beside x, scale and amax there is what only NVFP4 has: sr_rng_state, post_rht_amax and
  // rht_matrix. The last result is a workspace, which isn't used.
  template <class Call>
  explicit QuantizeCall(const Call& call)
      : config(ConfigOf<Config>(call, 6, 7)),
        x(call.Operand(0, "x")),
        scale(call.Operand(1, "scale")),
        amax(call.Operand(2, "amax")),
        outputs(call),
        dbias(call.Result(5, "dbias")),
        matrix(Flatten(NeedFloat(x), config.flatten_axis, "flatten_axis")) {
    NeedSize(amax.NeedDtype({DType::F32}), 1, "the largest magnitude so far");
    NeedSize(outputs.updated_amax.NeedDtype({DType::F32}), 1, "the largest magnitude");
    const auto& [out, colwise_out, scale_inv, colwise_scale_inv, updated_amax] = outputs;
    if (config.rowwise()) CheckDirection(x, matrix, out, scale_inv, config.scaling, false);
    if (config.colwise()) {
      CheckDirection(x, matrix, colwise_out, colwise_scale_inv, config.scaling, true);
    }
    outputs.NeedOneQType(config.layout);
    if (config.is_dbias) {
      NeedSize(dbias.NeedDtype({x.dtype}), matrix.cols, "one for each column of x");
    }
    if (te::is_tensor(config.scaling)) {
      NeedSize(scale.NeedDtype({DType::F32}), 1, "what x is multiplied with");
    }
  }

  // Sets what quantizers of all platforms are told alike.
  template <class Quantize>
  void Set(Quantize& args) const {
    args.x = x.data;
    args.dtype = te::float_of(x.dtype);
    args.rows = matrix.rows;
    args.cols = matrix.cols;
    args.scaling = config.scaling;
    outputs.Direct(config.layout, args);
    if (config.is_dbias) args.sums = dbias.data;
  }

  std::vector<Array> Unwanted() const {
    std::vector<Array> arrays = outputs.Unwanted(config.layout);
    if (!config.is_dbias) arrays.push_back(dbias);
    return arrays;
  }

  Config config;
  Array x, scale, amax;
  OutputArrays outputs;
  Array dbias;
  Matrix matrix;  // what x is taken as
};

// A group is some of the first axis of x; the axes from there to flatten_axis are rows of it. The
// sizes of groups are in the memory of the platform, and not looked at here.
struct GroupedCall {
  static constexpr char kTarget[] = "te_ffi_kernels.grouped_quantize";
  using Config = GroupedConfig;

  // The last result is a workspace, for platforms that use it.
  template <class Call>
  explicit GroupedCall(const Call& call)
      : config(ConfigOf<Config>(call, 3, 6)),
        x(call.Operand(0, "x")),
        scale(call.Operand(1, "scale")),
        group_sizes(call.Operand(2, "group_sizes")),
        outputs(call),
        matrix(Flatten(NeedFloat(x), config.flatten_axis, "flatten_axis")),
        rows_each(x.Product(1, matrix.axis)) {
    group_sizes.NeedRank(1).NeedDtype({DType::S32});
    groups = group_sizes.shape[0];
    NeedSize(outputs.updated_amax.NeedDtype({DType::F32}), groups, "one for each group");
    if (te::is_tensor(config.scaling)) {
      NeedSize(scale.NeedDtype({DType::F32}), groups, "what each group is multiplied with");
    }
    if (config.rowwise()) CheckDirection(outputs.out, outputs.scale_inv, false);
    if (config.colwise()) CheckDirection(outputs.colwise_out, outputs.colwise_scale_inv, true);
  }

  Config config;
  Array x, scale, group_sizes;
  OutputArrays outputs;
  Matrix matrix;
  int64_t rows_each, groups;

 private:
  void CheckDirection(const Array& qvalues, const Array& scales, bool by_column) const {
    NeedSize(NeedQValues(qvalues, config.scaling), x.size(), "one quantized value for each of x");
    // The kernel, which knows the sizes, checks the rows.
    if (config.scaling == te::Scaling::kMx && !by_column) NeedBlocks(x, matrix, by_column);
    CheckScales(scales, config.scaling, groups, by_column ? groups * matrix.cols : matrix.rows,
                x.size());
  }
};

}  // namespace jaxtap::ffi
