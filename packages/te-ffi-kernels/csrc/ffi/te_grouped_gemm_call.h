// What a call of grouped_gemm_v2 is given, checked, whatever platform it runs on. Transformer
// Engine's has six arrays of sizes, which are empty or the same; here there is one, and `ragged`.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_gemm_call.h"
#include "te/grouped_gemm.h"

namespace jaxtap::ffi {

struct GroupedGemmConfig {
  template <class Attributes>
  explicit GroupedGemmConfig(const Attributes& attributes)
      : scaling(te::scaling_of(NeedAttribute<int64_t>(attributes, "scaling_mode"))),
        lhs_axis(NeedAttribute<int64_t>(attributes, "lhs_axis_boundary")),
        rhs_axis(NeedAttribute<int64_t>(attributes, "rhs_axis_boundary")),
        lhs_transposed(NeedAttribute<bool>(attributes, "lhs_is_trans")),
        rhs_transposed(NeedAttribute<bool>(attributes, "rhs_is_trans")) {
    const auto given = NeedAttribute<int64_t>(attributes, "ragged");
    if (given < 0 || given > 1) {
      throw invalid_argument("ragged must be 0 (rows) or 1 (what is contracted), got ", given);
    }
    ragged = static_cast<te::Ragged>(given);
  }

  te::Scaling scaling;
  int64_t lhs_axis, rhs_axis;
  bool lhs_transposed;  // [k, lanes] of lhs
  bool rhs_transposed;  // [lanes, k] of rhs
  te::Ragged ragged;
};

struct GroupedGemmCall {
  static constexpr char kTarget[] = "te_ffi_kernels.grouped_gemm_v2";
  using Config = GroupedGemmConfig;

  // The last result is a workspace, for platforms that use it.
  template <class Call>
  explicit GroupedGemmCall(const Call& call)
      : config(ConfigOf<Config>(call, 8, 2)),
        lhs(call.Operand(0, "lhs")),
        bias(call.Operand(4, "bias")),
        group_sizes(call.Operand(5, "group_sizes")),
        alpha(call.Operand(6, "alpha")),
        beta(call.Operand(7, "beta")) {
    const Array rhs = call.Operand(2, "rhs"), out = call.Result(0, "output");
    group_sizes.NeedRank(1).NeedDtype({DType::S32});
    const int64_t groups = group_sizes.shape[0];
    const bool rows = config.ragged == te::Ragged::kRows;
    GemmSide left(lhs, config.lhs_axis, "lhs_axis_boundary", !config.lhs_transposed);
    GemmSide right(rhs, config.rhs_axis, "rhs_axis_boundary", config.rhs_transposed);
    if (rows) {
      // The groups are its first axis, of which one is left.
      const int64_t boundary = config.rhs_axis + (config.rhs_axis < 0 ? rhs.rank() : 0);
      if (rhs.shape[0] != groups || boundary < 2) {
        throw invalid_argument("rhs must have a first axis of ", groups, ", one for each of "
                               "group_sizes, before those of its matrices, got ", rhs.Text());
      }
      (config.rhs_transposed ? right.lanes : right.k) /= std::max<int64_t>(groups, 1);
    }
    NeedOneAxis(lhs, config.lhs_axis, rows != config.lhs_transposed);
    if (!rows) NeedOneAxis(rhs, config.rhs_axis, !config.rhs_transposed);
    CheckMatmul(lhs, left.k, rhs, right.k, config.scaling);
    // Each group's blocks would be counted from its own beginning otherwise.
    if (config.scaling == te::Scaling::kMx) {
      NeedFirstAxis(lhs, left.factor.k_is_last == rows);
      NeedFirstAxis(rhs, rows || !right.factor.k_is_last);
    }
    left.SetScales(lhs, call.Operand(1, "lhs_scale_inv"), config.scaling, groups,
                   rows ? left.lanes : groups * left.lanes);
    right.SetScales(rhs, call.Operand(3, "rhs_scale_inv"), config.scaling, groups,
                    groups * right.lanes);
    te::Gemm& each = args.each;
    each.m = left.lanes;
    each.n = right.lanes;
    each.k = left.k;
    each.scaling = config.scaling;
    each.lhs = left.factor;
    each.rhs = right.factor;
    each.out = out.data;
    NeedFloat(out);
    NeedSize(out, each.m * each.n * (rows ? 1 : groups), "rows of lhs times columns of rhs");
    each.out_dtype = te::float_of(out.dtype);
    if (bias.size() > 0) {
      if (!rows) {
        throw invalid_argument("bias must be empty where the contracted axis is divided, got ",
                               bias.Text());
      }
      NeedSize(bias.NeedDtype({out.dtype}), groups * each.n, "one for each column and group");
      each.bias = bias.data;
    }
    for (const Array* number : {&alpha, &beta}) {
      NeedSize(number->NeedDtype({DType::F32}), groups, "one for each group");
    }
    args.ragged = config.ragged;
    args.groups = groups;
    args.length = rows ? each.m : each.k;
  }

  Config config;
  Array lhs, bias, group_sizes, alpha, beta;
  te::GroupedGemm args;  // without alpha, which is in the memory of the platform

 private:
  // Throws where the side of a factor that is divided, the first or the last, has several axes.
  static void NeedOneAxis(const Array& data, int64_t boundary, bool first) {
    if (boundary < 0) boundary += data.rank();
    if (boundary == (first ? 1 : data.rank() - 1)) return;
    throw invalid_argument(data.name, " must be divided along its ", first ? "first" : "last",
                           " axis alone, got ", data.Text());
  }

  static void NeedFirstAxis(const Array& data, bool is_first) {
    if (is_first) return;
    throw invalid_argument(data.name, " must be divided along its first axis with MX, got ",
                           data.Text());
  }
};

}  // namespace jaxtap::ffi
