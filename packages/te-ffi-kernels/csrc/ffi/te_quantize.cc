// Handlers of dbias_quantize and grouped_quantize, with Transformer Engine's arguments, results and
// attributes.

#include "ffi/call.h"
#include "ffi/te_grouped_call.h"
#include "te/quantize.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

constexpr char kQuantize[] = "te_ffi_kernels.dbias_quantize";
constexpr char kGrouped[] = "te_ffi_kernels.grouped_quantize";

void Warm(const Attributes& attributes) {
  const QuantizeConfig config = QuantizeConfigOf(attributes);
  config.Check();
  te::warm_quantize(config.scaling(), te::has_rowwise(config.layout()),
                    te::has_colwise(config.layout()), config.is_dbias);
}

void Execute(const Call& call) {
  // x, scale, amax, and what only NVFP4 has: sr_rng_state, post_rht_amax, rht_matrix. The last
  // result is a workspace, which isn't used.
  call.NeedCounts(6, 7);
  const QuantizeConfig config = QuantizeConfigOf(call.attributes);
  const QuantizeCall given = {call.Operand(0, "x"),
                              call.Operand(1, "scale"),
                              call.Operand(2, "amax"),
                              call.Result(0, "output"),
                              call.Result(1, "colwise_output"),
                              call.Result(2, "scale_inv"),
                              call.Result(3, "colwise_scale_inv"),
                              call.Result(4, "updated_amax"),
                              call.Result(5, "dbias")};
  const Matrix matrix = given.Check(config);
  const auto& [x, scale, amax, out, colwise_out, scale_inv, colwise_scale_inv, updated_amax, dbias] =
      given;
  const Scaling scaling = config.scaling();
  const bool rowwise = te::has_rowwise(config.layout()), colwise = te::has_colwise(config.layout());

  if (!rowwise) Clear({out, scale_inv});
  if (!colwise) Clear({colwise_out, colwise_scale_inv});
  if (!config.is_dbias) Clear({dbias});

  te::Quantize args;
  args.x = x.data;
  args.dtype = te::float_of(x.dtype);
  args.rows = matrix.rows;
  args.cols = matrix.cols;
  args.code = te::code_of(given.CodeDtype(config));
  args.scaling = scaling;
  const bool tensor = te::is_tensor(scaling);
  if (tensor) {
    args.scale = *static_cast<const float*>(scale.data);
    const float inverse = 1.0f / args.scale;
    if (rowwise) *static_cast<float*>(scale_inv.data) = inverse;
    if (colwise) *static_cast<float*>(colwise_scale_inv.data) = inverse;
  }
  if (rowwise) {
    args.codes = static_cast<uint8_t*>(out.data);
    args.scales = scale_inv.data;
  }
  if (colwise) {
    args.turned = static_cast<uint8_t*>(colwise_out.data);
    args.turned_scales = colwise_scale_inv.data;
  }
  if (config.is_dbias) args.sums = dbias.data;
  args.wants_absmax = tensor;
  // It may be the same memory as the result.
  const float before = *static_cast<const float*>(amax.data);
  XlaScheduler scheduler(call);
  const float found = te::quantize(args, Parallel(scheduler));
  *static_cast<float*>(updated_amax.data) = tensor && !(before >= found) ? found : before;
}

const Handlers<kQuantize, Warm, Execute> kHandlers;

void ExecuteGrouped(const Call& call) {
  call.NeedCounts(3, 6);  // the last result is a workspace, which isn't used
  const GroupedConfig config(call.attributes);
  const GroupedCall given = {call.Operand(0, "x"),
                             call.Operand(1, "scale"),
                             call.Operand(2, "group_sizes"),
                             call.Result(0, "output"),
                             call.Result(1, "colwise_output"),
                             call.Result(2, "scale_inv"),
                             call.Result(3, "colwise_scale_inv"),
                             call.Result(4, "updated_amax")};
  const Groups found = given.Check(config);
  const Matrix& matrix = found.matrix;
  const int64_t groups = found.count, rows_each = found.rows_each;
  const auto& [x, scale, group_sizes, out, colwise_out, scale_inv, colwise_scale_inv, amax] = given;
  const Scaling scaling = config.scaling;
  const bool rowwise = config.rowwise, colwise = config.colwise;
  const bool tensor = te::is_tensor(scaling), mx = scaling == Scaling::kMx;
  if (!rowwise) Clear({out, scale_inv});
  if (!colwise) Clear({colwise_out, colwise_scale_inv});

  const auto* sizes = static_cast<const int32_t*>(group_sizes.data);
  int64_t sum = 0;
  for (int64_t i = 0; i < groups; ++i) {
    if (sizes[i] < 0) {
      throw invalid_argument("group_sizes[", i, "] is ", sizes[i], ", and must be at least 0");
    }
    if (mx && colwise && sizes[i] * rows_each % te::kBlock != 0) {
      throw invalid_argument("group_sizes[", i, "] is ", sizes[i], ", with ", rows_each,
                             " rows each; MX blocks by column need a multiple of 32 rows");
    }
    sum += sizes[i];
  }
  if (sum != x.shape[0]) {
    throw invalid_argument("group_sizes has the sum ", sum, ", and must have that of the first "
                           "axis of x, ", x.Text());
  }

  XlaScheduler scheduler(call);
  const Parallel parallel(scheduler);
  const size_t number_bytes = byte_size(x.dtype);
  int64_t row = 0;
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t rows = sizes[i] * rows_each, at = row * matrix.cols;
    te::Quantize args;
    args.x = static_cast<const char*>(x.data) + static_cast<size_t>(at) * number_bytes;
    args.dtype = te::float_of(x.dtype);
    args.rows = rows;
    args.cols = matrix.cols;
    args.code = te::code_of(given.CodeDtype(config));
    args.scaling = scaling;
    args.wants_absmax = tensor;
    const auto scales_of = [&](const Array& scales, bool by_column) -> void* {
      if (mx) return static_cast<uint8_t*>(scales.data) + at / te::kBlock;
      return static_cast<float*>(scales.data) + (by_column ? i * matrix.cols : row);
    };
    if (rowwise) {
      args.codes = static_cast<uint8_t*>(out.data) + at;
      if (!tensor) args.scales = scales_of(scale_inv, false);
    }
    if (colwise) {
      args.turned = static_cast<uint8_t*>(colwise_out.data) + at;
      if (!tensor) args.turned_scales = scales_of(colwise_scale_inv, true);
    }
    if (tensor) {
      args.scale = static_cast<const float*>(scale.data)[i];
      if (rowwise) static_cast<float*>(scale_inv.data)[i] = 1.0f / args.scale;
      if (colwise) static_cast<float*>(colwise_scale_inv.data)[i] = 1.0f / args.scale;
    }
    static_cast<float*>(amax.data)[i] = te::quantize(args, parallel);
    row += rows;
  }
}

const Registration kGroupedRegistration(
    {kGrouped, nullptr, ffi::Execute<kGrouped, ExecuteGrouped>,
     "Which loops run depends on group_sizes, which are read on the host while the call runs, as "
     "Transformer Engine does on GPU, where it synchronises the stream; the kernels for CUDA here "
     "read them on the device, and are warmed up"});

}  // namespace
}  // namespace jaxtap::ffi
