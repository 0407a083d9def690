// What a call of dot_int8 is given, checked, whatever platform it runs on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "training/dot_int8.h"

namespace jaxtap::ffi {

struct DotInt8Config {
  template <class Attributes>
  explicit DotInt8Config(const Attributes& attributes)
      : lhs_last(NeedAttribute<bool>(attributes, "lhs_last")),
        rhs_last(NeedAttribute<bool>(attributes, "rhs_last")) {}

  bool lhs_last, rhs_last;
};

struct DotInt8Call {
  static constexpr char kTarget[] = "te_ffi_kernels.dot_int8";
  using Config = DotInt8Config;

  template <class Call>
  explicit DotInt8Call(const Call& call) {
    const auto config = ConfigOf<Config>(call, 4, 1);
    const Array lhs = call.Operand(0, "lhs"), rhs = call.Operand(1, "rhs");
    const Array lhs_scale = call.Operand(2, "lhs_scale"), rhs_scale = call.Operand(3, "rhs_scale");
    const Array out = call.Result(0, "out");
    for (const Array* side : {&lhs, &rhs}) {
      side->NeedDtype({DType::S8});
      if (side->rank() < 2) {
        throw invalid_argument(side->name, " must have 2 axes or more, got ", side->Text());
      }
    }
    const int64_t rank = lhs.rank();
    args.groups = lhs.Product(0, rank - 2);
    args.lhs_last = config.lhs_last;
    args.rhs_last = config.rhs_last;
    args.k = lhs.shape[rank - 2 + config.lhs_last];
    args.m = lhs.shape[rank - 1 - config.lhs_last];
    args.n = rhs.shape[rhs.rank() - 1 - config.rhs_last];
    NeedSize(rhs, args.groups * args.k * args.n, "as many that are summed as of lhs");
    NeedSize(lhs_scale.NeedDtype({DType::F32}), args.groups * args.m,
             "one for each sum over those of lhs");
    NeedSize(rhs_scale.NeedDtype({DType::F32}), args.groups * args.n,
             "one for each sum over those of rhs");
    NeedSize(out.NeedDtype({DType::F32}), args.groups * args.m * args.n,
             "one for each pair of scales");
    args.lhs = static_cast<const int8_t*>(lhs.data);
    args.rhs = static_cast<const int8_t*>(rhs.data);
    args.lhs_scales = static_cast<const float*>(lhs_scale.data);
    args.rhs_scales = static_cast<const float*>(rhs_scale.data);
    args.out = static_cast<float*>(out.data);
  }

  training::Dot args;
};

}  // namespace jaxtap::ffi
