// Handlers of dbias_quantize and grouped_quantize.

#include <cstring>
#include <tuple>

#include "ffi/call.h"
#include "ffi/te_outputs.h"
#include "ffi/te_quantize_call.h"
#include "te/quantize.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

void Run(const QuantizeCall& given, const Parallel& parallel) {
  Clear(given.Unwanted());
  te::Quantize args;
  given.Set(args);
  const bool tensor = te::is_tensor(args.scaling);
  if (tensor) {
    args.scale = *static_cast<const float*>(given.scale.data);
    SetInverses(args);
  }
  args.wants_absmax = tensor;
  // It may be the same memory as the result.
  const float before = *static_cast<const float*>(given.amax.data);
  const float found = te::quantize(args, parallel);
  *static_cast<float*>(given.outputs.updated_amax.data) =
      tensor && !(before >= found) ? found : before;
}

void RunGrouped(const GroupedCall& given, const Parallel& parallel) {
  const auto& [out, colwise_out, scale_inv, colwise_scale_inv, amax] = given.outputs;
  const Array& x = given.x;
  const Matrix& matrix = given.matrix;
  const int64_t groups = given.groups, rows_each = given.rows_each;
  const Scaling scaling = given.config.scaling;
  const bool rowwise = given.config.rowwise(), colwise = given.config.colwise();
  const bool tensor = te::is_tensor(scaling), mx = scaling == Scaling::kMx;
  Clear(given.outputs.Unwanted(given.config.layout));

  const auto* sizes = static_cast<const int32_t*>(given.group_sizes.data);
  int64_t sum = 0;
  for (int64_t i = 0; i < groups; ++i) {
    if (sizes[i] < 0) {
      throw invalid_argument("group_sizes[", i, "] must be at least 0, got ", sizes[i]);
    }
    if (mx && colwise && sizes[i] * rows_each % te::kBlock != 0) {
      throw invalid_argument("the rows of group_sizes[", i,
                             "] must be a multiple of 32 for MX blocks by column, got ", sizes[i],
                             " with ", rows_each, " rows each");
    }
    sum += sizes[i];
  }
  if (sum > x.shape[0]) {
    throw invalid_argument("the sum of group_sizes must be at most the first axis of x, ",
                           x.Text(), ", got ", sum);
  }
  const auto clear = [](const Array& array, int64_t from) {
    const auto size = static_cast<int64_t>(byte_size(array.dtype));
    std::memset(static_cast<char*>(array.data) + from * size, 0,
                static_cast<size_t>((array.size() - from) * size));
  };
  // What rows have that no group has.
  const int64_t used = sum * rows_each;
  for (const auto& [wanted, qvalues, scales, by_row] :
       {std::tuple(rowwise, out, scale_inv, true),
        std::tuple(colwise, colwise_out, colwise_scale_inv, false)}) {
    if (!wanted) continue;
    clear(qvalues, used * matrix.cols);
    if (mx) clear(scales, used * matrix.cols / te::kBlock);
    if (by_row && scaling == Scaling::kChannel) clear(scales, used);
  }

  int64_t row = 0;
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t rows = sizes[i] * rows_each, at = row * matrix.cols;
    te::Quantize args;
    args.x = static_cast<const char*>(x.data) + static_cast<size_t>(at) * byte_size(x.dtype);
    args.dtype = te::float_of(x.dtype);
    args.rows = rows;
    args.cols = matrix.cols;
    args.qtype = given.outputs.QType(given.config.layout);
    args.scaling = scaling;
    args.wants_absmax = tensor;
    const auto scales_of = [&](const Array& scales, bool by_column) -> void* {
      if (mx) return static_cast<uint8_t*>(scales.data) + at / te::kBlock;
      return static_cast<float*>(scales.data) + (tensor ? i : by_column ? i * matrix.cols : row);
    };
    if (rowwise) {
      args.qvalues = static_cast<uint8_t*>(out.data) + at;
      args.scales = scales_of(scale_inv, false);
    }
    if (colwise) {
      args.colwise = static_cast<uint8_t*>(colwise_out.data) + at;
      args.colwise_scales = scales_of(colwise_scale_inv, true);
    }
    if (tensor) {
      args.scale = static_cast<const float*>(given.scale.data)[i];
      SetInverses(args);
    }
    static_cast<float*>(amax.data)[i] = te::quantize(args, parallel);
    row += rows;
  }
}

const Handlers<QuantizeCall, Run> kQuantize;
const Handlers<GroupedCall, RunGrouped> kGrouped;

}  // namespace
}  // namespace jaxtap::ffi
