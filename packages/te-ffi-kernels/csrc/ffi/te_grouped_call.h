// What a call of grouped_quantize is given, checked, whatever platform it runs on. The sizes of
// groups are in the memory of the platform, and not looked at here.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_quantize_call.h"

namespace jaxtap::ffi {

struct GroupedConfig {
  template <class Attributes>
  explicit GroupedConfig(const Attributes& attributes)
      : scaling(QuantizedScaling(NeedAttribute<int64_t>(attributes, "scaling_mode"))),
        flatten_axis(NeedAttribute<int64_t>(attributes, "flatten_axis")) {
    const te::Layout layout = te::layout_of(NeedAttribute<int64_t>(attributes, "q_layout"));
    rowwise = te::has_rowwise(layout);
    colwise = te::has_colwise(layout);
  }

  te::Scaling scaling;
  bool rowwise, colwise;
  int64_t flatten_axis;
};

// A group is some of the first axis of x; the axes from there to flatten_axis are rows of it.
struct Groups {
  Matrix matrix;
  int64_t count, rows_each;
};

struct GroupedCall {
  Array x, scale, group_sizes, out, colwise_out, scale_inv, colwise_scale_inv, updated_amax;

  DType CodeDtype(const GroupedConfig& config) const {
    return (config.rowwise ? out : colwise_out).dtype;
  }

  Groups Check(const GroupedConfig& config) const {
    NeedFloat(x);
    const Matrix matrix = Flatten(x, config.flatten_axis, "flatten_axis");
    group_sizes.NeedRank(1).NeedDtype({DType::S32});
    const int64_t groups = group_sizes.shape[0];
    NeedSize(updated_amax.NeedDtype({DType::F32}), groups, "one for each group");
    if (te::is_tensor(config.scaling)) {
      NeedSize(scale.NeedDtype({DType::F32}), groups, "what each group is multiplied with");
    }
    if (config.rowwise) CheckOne(config, matrix, groups, false);
    if (config.colwise) CheckOne(config, matrix, groups, true);
    return {matrix, groups, x.Product(1, matrix.axis)};
  }

 private:
  void CheckOne(const GroupedConfig& config, const Matrix& matrix, int64_t groups,
                bool by_column) const {
    const Array& scales = by_column ? colwise_scale_inv : scale_inv;
    NeedSize(NeedCodes(by_column ? colwise_out : out, config.scaling), x.size(),
             "one code for each of x");
    NeedScales(scales, config.scaling);
    if (config.scaling == te::Scaling::kMx) {
      if (!by_column) NeedBlocks(x, matrix.cols, "columns (axes from flatten_axis)");
      NeedSize(scales, x.size() / te::kBlock, "one scale for 32 codes");
    } else if (config.scaling == te::Scaling::kChannel) {
      NeedSize(scales, by_column ? groups * matrix.cols : matrix.rows, "one for each slice");
    } else {
      NeedSize(scales, groups, "one for each group");
    }
  }
};

}  // namespace jaxtap::ffi
