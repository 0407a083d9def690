// What a call of quantize_int8 is given, checked, whatever platform it runs on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "training/quantize_int8.h"

namespace jaxtap::ffi {

struct QuantizeInt8Config {
  template <class Attributes>
  explicit QuantizeInt8Config(const Attributes& attributes)
      : by_row(NeedAttribute<bool>(attributes, "by_row")),
        factors(NeedAttribute<bool>(attributes, "factors")) {
    const auto given = NeedAttribute<int64_t>(attributes, "noise");
    if (given < 0 || given > 3) throw invalid_argument("noise must be 0 to 3, got ", given);
    noise = static_cast<training::Noise>(given);
  }

  bool by_row, factors;
  training::Noise noise;
};

struct QuantizeInt8Call {
  static constexpr char kTarget[] = "te_ffi_kernels.quantize_int8";
  using Config = QuantizeInt8Config;

  template <class Call>
  explicit QuantizeInt8Call(const Call& call) {
    using training::Noise;
    const Config config(call.attributes);
    const bool noisy = config.noise != Noise::kNone;
    call.NeedCounts(1 + config.factors + noisy, 2);
    const Array x = call.Operand(0, "x"), out = call.Result(0, "out");
    const Array scales = call.Result(1, "scale");
    NeedFloat(x);
    if (x.rank() < 3) {
      throw invalid_argument("x must have 3 axes or more, blocks, rows and columns, got ",
                             x.Text());
    }
    const int64_t rank = x.rank();
    args.groups = x.Product(0, rank - 3);
    args.blocks = x.shape[rank - 3];
    args.rows = x.shape[rank - 2];
    args.columns = x.shape[rank - 1];
    args.dtype = te::float_of(x.dtype);
    args.by_row = config.by_row;
    args.noise = config.noise;
    const int64_t blocks = args.groups * args.blocks, rows = blocks * args.rows;
    if (args.blocks * args.rows * args.columns >= int64_t{1} << 32) {
      throw invalid_argument("the blocks, rows and columns of x must have less than 2^32 numbers, "
                             "got ", x.Text());
    }
    NeedSize(out.NeedDtype({DType::S8}), x.size(), "a quantized value for each of x");
    NeedSize(scales.NeedDtype({DType::F32}), config.by_row ? rows : blocks * args.columns,
             config.by_row ? "one for each row" : "one for each column");
    if (config.factors) {
      const Array factors = call.Operand(1, "factors");
      NeedSize(factors.NeedDtype({DType::F32}), config.by_row ? blocks * args.columns : rows,
               config.by_row ? "one for each column" : "one for each row");
      args.factors = static_cast<const float*>(factors.data);
    }
    if (config.noise == Noise::kGiven) {
      const Array noise = call.Operand(1 + config.factors, "noise");
      NeedSize(noise.NeedDtype({DType::F32}), rows, "one for each row");
      args.given = static_cast<const float*>(noise.data);
    } else if (noisy) {
      const Array key = call.Operand(1 + config.factors, "key");
      NeedSize(key.NeedDtype({DType::U32}), 2 * args.groups, "two words of a key for each group");
      args.keys = static_cast<const uint32_t*>(key.data);
    }
    args.x = x.data;
    args.out = static_cast<int8_t*>(out.data);
    args.scales = static_cast<float*>(scales.data);
  }

  training::Args args;
};

}  // namespace jaxtap::ffi
