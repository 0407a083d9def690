// What a call of fake_quantize is given, checked, whatever platform it runs on.

#pragma once

#include <algorithm>
#include <cmath>

#include "fakequant/fake_quantize.h"
#include "ffi/attributes.h"
#include "ffi/te_arguments.h"

namespace jaxtap::ffi {

struct FakeQuantizeConfig {
  template <class Attributes>
  explicit FakeQuantizeConfig(const Attributes& attributes)
      : batch_axes(NeedAttribute<int64_t>(attributes, "batch_axes")),
        bits_axis(NeedAttribute<int64_t>(attributes, "bits_axis")),
        seen(NeedAttribute<bool>(attributes, "seen")) {
    const auto bits = NeedAttribute<int64_t>(attributes, "bits");
    if (bits < 2 || bits > 16) throw invalid_argument("bits must be 2 to 16, got ", bits);
    options.bits = static_cast<int>(bits);
    options.symmetric = NeedAttribute<bool>(attributes, "symmetric");
    options.observe = NeedAttribute<bool>(attributes, "observe");
    options.join = NeedAttribute<bool>(attributes, "join");
    options.share = NeedAttribute<float>(attributes, "share");
    if (options.observe && !seen) {
      throw invalid_argument("observe must be false without seen, got true");
    }
  }

  fakequant::Options options;
  int64_t batch_axes;
  int64_t bits_axis;  // of x, along which eight numbers share a byte of `inside`; -1 if none do
  bool seen;
};

struct FakeQuantizeCall {
  static constexpr char kTarget[] = "te_ffi_kernels.fake_quantize";
  using Config = FakeQuantizeConfig;

  template <class Call>
  explicit FakeQuantizeCall(const Call& call) {
    const Config config(call.attributes);
    call.NeedCounts(config.seen ? 4 : 3, config.options.observe ? 4 : 3);
    const Array x = call.Operand(0, "x"), terms = call.Operand(1, "terms");
    const Array row = call.Operand(2, "row"), out = call.Result(0, "out");
    const Array inside = call.Result(1, "inside"), bounds = call.Result(2, "bounds");
    args.options = config.options;
    NeedFloat(x);
    if (config.batch_axes < 0 || config.batch_axes > x.rank()) {
      throw invalid_argument("batch_axes must be a number of axes of x, ", x.Text(), ", got ",
                             config.batch_axes);
    }
    args.indices = x.Product(0, config.batch_axes);
    args.numbers = x.Product(config.batch_axes, x.rank());
    args.dtype = te::float_of(x.dtype);
    NeedSize(out.NeedDtype({x.dtype}), x.size(), "as x");
    if (config.bits_axis < -1 || config.bits_axis >= x.rank()) {
      throw invalid_argument("bits_axis must be -1 or an axis of x, ", x.Text(), ", got ",
                             config.bits_axis);
    }
    if (config.bits_axis >= 0) {
      args.blocks = x.Product(0, config.bits_axis);
      args.rows = x.shape[config.bits_axis];
    }
    args.columns = x.Product(config.bits_axis + 1, x.rank());
    NeedSize(inside.NeedDtype({DType::U8}), args.blocks * ((args.rows + 7) / 8) * args.columns,
             "a bit for each of x");
    const Array& table = terms.NeedDtype({DType::F32}).NeedRank(3);
    rows = table.shape[0];
    table.NeedShape({std::max<int64_t>(1, rows), 5, 2}, "at least one row of five terms");
    NeedSize(row.NeedDtype({DType::S32}), 1, "the row of the terms");
    bounds.NeedDtype({DType::F32}).NeedShape({2}, "the lower and the upper bound");
    args.x = x.data;
    args.out = out.data;
    args.inside = static_cast<uint8_t*>(inside.data);
    args.bounds = static_cast<float*>(bounds.data);
    terms_of_rows = static_cast<const fakequant::Terms*>(terms.data);
    row_number = static_cast<const int32_t*>(row.data);
    const auto seen_of_rows = [&](const Array& array) {
      array.NeedDtype({DType::F32}).NeedShape({rows, 2}, "two bounds for each row of terms");
      return static_cast<float*>(array.data);
    };
    if (config.seen) args.seen = seen_of_rows(call.Operand(3, "seen"));
    if (config.options.observe) args.observed = seen_of_rows(call.Result(3, "observed"));
  }

  // With tables for all rows.
  fakequant::Args args;
  int64_t rows = 0;
  const fakequant::Terms* terms_of_rows = nullptr;
  const int32_t* row_number = nullptr;
};

}  // namespace jaxtap::ffi
