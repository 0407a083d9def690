// What a call of topk is given, checked, whatever platform it runs on. Transformer Engine's has the
// lengths of rows as well, which are all that of the rows; here there are none.

#pragma once

#include <limits>

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "router/topk.h"

namespace jaxtap::ffi {

struct TopKConfig {
  template <class Attributes>
  explicit TopKConfig(const Attributes& attributes)
      : k(NeedAttribute<int64_t>(attributes, "k_value")) {
    if (k < 1) throw invalid_argument("k_value must be positive, got ", k);
  }

  int64_t k;
};

struct TopKCall {
  static constexpr char kTarget[] = "te_ffi_kernels.topk";
  using Config = TopKConfig;

  template <class Call>
  explicit TopKCall(const Call& call) {
    const auto config = ConfigOf<Config>(call, 1, 2);
    const Array keys = call.Operand(0, "keys"), values = call.Result(0, "values");
    const Array indices = call.Result(1, "indices");
    NeedFloat(keys);
    const int64_t rank = keys.rank();
    if (rank < 1 || keys.shape[rank - 1] < config.k) {
      throw invalid_argument("keys must have at least k_value, ", config.k, ", in a row, got ",
                             keys.Text());
    }
    args.cols = keys.shape[rank - 1];
    if (args.cols > std::numeric_limits<int32_t>::max()) {
      throw invalid_argument("keys is ", keys.Text(), ", with rows that int32 has no index for");
    }
    args.rows = keys.Product(0, rank - 1);
    args.k = config.k;
    args.keys = keys.data;
    args.dtype = te::float_of(keys.dtype);
    NeedSize(values.NeedDtype({keys.dtype}), args.rows * args.k, "k_value for each row");
    NeedSize(indices.NeedDtype({DType::S32}), args.rows * args.k, "k_value for each row");
    args.values = values.data;
    args.indices = static_cast<int32_t*>(indices.data);
  }

  router::TopK args;
};

}  // namespace jaxtap::ffi
