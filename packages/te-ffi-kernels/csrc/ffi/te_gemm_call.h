// What a call of gemm_v2 is given, checked, whatever platform it runs on. Its config may have one
// member more than Transformer Engine's: fuse_gelu.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "te/gemm.h"

namespace jaxtap::ffi {

struct GemmConfig {
  template <class Attributes>
  explicit GemmConfig(const Attributes& attributes) {
    const auto config = NeedAttribute<Attributes>(attributes, "config");
    scaling = te::scaling_of(NeedAttribute<int64_t>(config, "scaling_mode"));
    lhs_axis = NeedAttribute<int64_t>(config, "lhs_axis_boundary");
    rhs_axis = NeedAttribute<int64_t>(config, "rhs_axis_boundary");
    lhs_transposed = NeedAttribute<bool>(config, "lhs_transposed");
    rhs_transposed = NeedAttribute<bool>(config, "rhs_transposed");
    split_accumulator = NeedAttribute<bool>(config, "use_split_accumulator");
    gelu = AttributeOr<bool>(config, "fuse_gelu", false);
    const auto collective = NeedAttribute<int64_t>(config, "collective_op");
    if (collective != 0) {
      throw invalid_argument("collective_op must be 0 (none), got ", collective, ". There is no "
                             "kernel for matmuls that communicate; shard the operands and let XLA "
                             "communicate.");
    }
  }

  te::Scaling scaling;
  int64_t lhs_axis, rhs_axis;
  bool lhs_transposed, rhs_transposed;
  bool split_accumulator;  // for kernels whose sums aren't in float32 in any case
  bool gelu;
};

// One factor: its lanes, and its k.
struct GemmSide {
  GemmSide(const Array& data, int64_t axis, const char* axis_name, bool k_is_last) {
    const Matrix matrix = Flatten(data, axis, axis_name);
    lanes = k_is_last ? matrix.rows : matrix.cols;
    k = k_is_last ? matrix.cols : matrix.rows;
    factor.data = data.data;
    factor.dtype = data.dtype;
    factor.k_is_last = k_is_last;
  }

  // Takes its scales, once they are checked: as many per tensor, and per channel.
  void SetScales(const Array& data, const Array& scales, te::Scaling scaling, int64_t tensors,
                 int64_t channels) {
    if (scaling == te::Scaling::kNone) {
      NeedFloat(data);
      return;
    }
    NeedQValues(data, scaling);
    if (scaling == te::Scaling::kMx) NeedBlocks(data, k, "contracted axes");
    CheckScales(scales, scaling, tensors, channels, data.size());
    factor.scales = scales.data;
  }

  int64_t lanes, k;
  te::Factor factor;
};

// Throws for two factors that have no matmul, with so many numbers contracted.
inline void CheckMatmul(const Array& lhs, int64_t lhs_k, const Array& rhs, int64_t rhs_k,
                        te::Scaling scaling) {
  const bool alike =
      scaling == te::Scaling::kNone || lhs.dtype == DType::S8 || rhs.dtype == DType::S8;
  if (alike && lhs.dtype != rhs.dtype) {
    throw invalid_argument("rhs must be of ", jaxtap::name(lhs.dtype), " like lhs, got ",
                           rhs.Text());
  }
  if (lhs.dtype == DType::F8E5M2 && rhs.dtype == DType::F8E5M2) {
    throw invalid_argument("lhs and rhs are both float8_e5m2; one of them must be float8_e4m3fn");
  }
  if (lhs_k != rhs_k) {
    throw invalid_argument("rhs must have ", lhs_k, " contracted, as lhs, ", lhs.Text(), ", got ",
                           rhs_k, " in ", rhs.Text());
  }
  if (lhs.dtype == DType::S8 && lhs_k > te::kMostInt8) {
    throw invalid_argument("lhs is ", lhs.Text(), " with ", lhs_k,
                           " contracted; sums of int8 are exact up to ", te::kMostInt8);
  }
}

struct GemmCall {
  static constexpr char kTarget[] = "te_ffi_kernels.gemm_v2";
  using Config = GemmConfig;

  // The last result is a workspace, for platforms that use it.
  template <class Call>
  explicit GemmCall(const Call& call)
      : config(ConfigOf<Config>(call, 7, 2)),
        lhs(call.Operand(0, "lhs")),
        bias(call.Operand(4, "bias")),
        alpha(call.Operand(5, "alpha")),
        beta(call.Operand(6, "beta")) {
    const Array rhs = call.Operand(2, "rhs"), out = call.Result(0, "output");
    GemmSide left(lhs, config.lhs_axis, "lhs_axis_boundary", !config.lhs_transposed);
    GemmSide right(rhs, config.rhs_axis, "rhs_axis_boundary", config.rhs_transposed);
    left.SetScales(lhs, call.Operand(1, "lhs_scale_inv"), config.scaling, 1, left.lanes);
    right.SetScales(rhs, call.Operand(3, "rhs_scale_inv"), config.scaling, 1, right.lanes);
    CheckMatmul(lhs, left.k, rhs, right.k, config.scaling);
    for (const Array* number : {&alpha, &beta}) {
      NeedSize(number->NeedDtype({DType::F32}), 1, "a factor");
    }
    NeedFloat(out);
    NeedSize(out, left.lanes * right.lanes, "rows of lhs times columns of rhs");
    args.m = left.lanes;
    args.n = right.lanes;
    args.k = left.k;
    args.scaling = config.scaling;
    args.lhs = left.factor;
    args.rhs = right.factor;
    args.out = out.data;
    args.out_dtype = te::float_of(out.dtype);
    if (bias.size() > 0) {
      NeedSize(bias.NeedDtype({out.dtype}), args.n, "one for each column of the result, or none");
      args.bias = bias.data;
    }
    args.gelu = config.gelu;
  }

  Config config;
  Array lhs, bias, alpha, beta;
  te::Gemm args;  // without alpha, which is in the memory of the platform
};

}  // namespace jaxtap::ffi
