// What a call of dot_int8 is given, checked, whatever platform it runs on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "training/dot_int8.h"

namespace jaxtap::ffi {

struct DotInt8Call {
  static constexpr char kTarget[] = "te_ffi_kernels.dot_int8";
  using Config = NoConfig;

  template <class Call>
  explicit DotInt8Call(const Call& call) {
    call.NeedCounts(4, 1);
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
    args.k = lhs.shape[rank - 2];
    args.m = lhs.shape[rank - 1];
    args.n = rhs.shape[rhs.rank() - 1];
    NeedSize(rhs, args.groups * args.k * args.n, "rows as lhs has them");
    NeedSize(lhs_scale.NeedDtype({DType::F32}), args.groups * args.m, "one for each column of lhs");
    NeedSize(rhs_scale.NeedDtype({DType::F32}), args.groups * args.n, "one for each column of rhs");
    NeedSize(out.NeedDtype({DType::F32}), args.groups * args.m * args.n,
             "a row for each column of lhs");
    args.lhs = static_cast<const int8_t*>(lhs.data);
    args.rhs = static_cast<const int8_t*>(rhs.data);
    args.lhs_scales = static_cast<const float*>(lhs_scale.data);
    args.rhs_scales = static_cast<const float*>(rhs_scale.data);
    args.out = static_cast<float*>(out.data);
  }

  training::Dot args;
};

}  // namespace jaxtap::ffi
