// Handlers of dbias_quantize and grouped_quantize, with Transformer Engine's arguments, results and
// attributes.

#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_grouped_call.h"
#include "ffi/threads.h"
#include "te/quantize.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

void Warm(const QuantizeConfig& config) {
  config.Check();
  te::warm_quantize(config.scaling(), te::has_rowwise(config.layout()),
                    te::has_colwise(config.layout()), config.is_dbias);
}

void Execute(const QuantizeConfig& config, xffi::ThreadPool pool, xffi::AnyBuffer x_buffer,
             xffi::AnyBuffer scale_buffer, xffi::AnyBuffer amax_buffer,
             xffi::Result<xffi::AnyBuffer> out_buffer,
             xffi::Result<xffi::AnyBuffer> colwise_out_buffer,
             xffi::Result<xffi::AnyBuffer> scale_inv_buffer,
             xffi::Result<xffi::AnyBuffer> colwise_scale_inv_buffer,
             xffi::Result<xffi::AnyBuffer> updated_amax_buffer,
             xffi::Result<xffi::AnyBuffer> dbias_buffer) {
  const QuantizeCall call = {Read("x", x_buffer),
                             Read("scale", scale_buffer),
                             Read("amax", amax_buffer),
                             Read("output", out_buffer),
                             Read("colwise_output", colwise_out_buffer),
                             Read("scale_inv", scale_inv_buffer),
                             Read("colwise_scale_inv", colwise_scale_inv_buffer),
                             Read("updated_amax", updated_amax_buffer),
                             Read("dbias", dbias_buffer)};
  const Matrix matrix = call.Check(config);
  const auto& [x, scale, amax, out, colwise_out, scale_inv, colwise_scale_inv, updated_amax, dbias] =
      call;
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
  args.code = te::code_of(call.CodeDtype(config));
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
  XlaScheduler scheduler(pool);
  const float found = te::quantize(args, Parallel(scheduler));
  *static_cast<float*>(updated_amax.data) = tensor && !(before >= found) ? found : before;
}

XLA_FFI_DEFINE_HANDLER(
    kQuantizeInstantiate,
    [](int64_t scaling_mode, int64_t q_layout, bool is_dbias, int64_t flatten_axis,
       bool stochastic_rounding, bool use_rht) {
      return Warmed("te_ffi_kernels.dbias_quantize", [&] {
        Warm({scaling_mode, q_layout, is_dbias, flatten_axis, stochastic_rounding, use_rht});
      });
    },
    xffi::Ffi::BindInstantiate()
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("q_layout")
        .Attr<bool>("is_dbias")
        .Attr<int64_t>("flatten_axis")
        .Attr<bool>("stochastic_rounding")
        .Attr<bool>("use_rht"));

XLA_FFI_DEFINE_HANDLER(
    kQuantizeExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer scale, xffi::AnyBuffer amax,
       xffi::AnyBuffer, xffi::AnyBuffer, xffi::AnyBuffer, xffi::Result<xffi::AnyBuffer> out,
       xffi::Result<xffi::AnyBuffer> colwise_out, xffi::Result<xffi::AnyBuffer> scale_inv,
       xffi::Result<xffi::AnyBuffer> colwise_scale_inv, xffi::Result<xffi::AnyBuffer> updated_amax,
       xffi::Result<xffi::AnyBuffer> dbias, xffi::Result<xffi::AnyBuffer>, int64_t scaling_mode,
       int64_t q_layout, bool is_dbias, int64_t flatten_axis, bool stochastic_rounding,
       bool use_rht) {
      return Guarded("te_ffi_kernels.dbias_quantize", [&] {
        Execute({scaling_mode, q_layout, is_dbias, flatten_axis, stochastic_rounding, use_rht},
                pool, x, scale, amax, out, colwise_out, scale_inv, colwise_scale_inv, updated_amax,
                dbias);
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // x
        .Arg<xffi::AnyBuffer>()  // scale
        .Arg<xffi::AnyBuffer>()  // amax
        .Arg<xffi::AnyBuffer>()  // sr_rng_state, not used
        .Arg<xffi::AnyBuffer>()  // post_rht_amax, not used
        .Arg<xffi::AnyBuffer>()  // rht_matrix, not used
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // colwise_output
        .Ret<xffi::AnyBuffer>()  // scale_inv
        .Ret<xffi::AnyBuffer>()  // colwise_scale_inv
        .Ret<xffi::AnyBuffer>()  // updated_amax
        .Ret<xffi::AnyBuffer>()  // dbias
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("q_layout")
        .Attr<bool>("is_dbias")
        .Attr<int64_t>("flatten_axis")
        .Attr<bool>("stochastic_rounding")
        .Attr<bool>("use_rht"));

const Registration kQuantize({"te_ffi_kernels.dbias_quantize", kQuantizeInstantiate,
                              kQuantizeExecute});

void ExecuteGrouped(xffi::ThreadPool pool, const GroupedConfig& config, const GroupedCall& call) {
  const Groups given = call.Check(config);
  const Matrix& matrix = given.matrix;
  const int64_t groups = given.count, rows_each = given.rows_each;
  const auto& [x, scale, group_sizes, out, colwise_out, scale_inv, colwise_scale_inv, amax] = call;
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

  XlaScheduler scheduler(pool);
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
    args.code = te::code_of(call.CodeDtype(config));
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

XLA_FFI_DEFINE_HANDLER(
    kGroupedExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer scale,
       xffi::AnyBuffer group_sizes, xffi::Result<xffi::AnyBuffer> out,
       xffi::Result<xffi::AnyBuffer> colwise_out, xffi::Result<xffi::AnyBuffer> scale_inv,
       xffi::Result<xffi::AnyBuffer> colwise_scale_inv, xffi::Result<xffi::AnyBuffer> amax,
       xffi::Result<xffi::AnyBuffer>, xffi::Dictionary attributes) {
      return Guarded("te_ffi_kernels.grouped_quantize", [&] {
        ExecuteGrouped(pool, GroupedConfig(attributes),
                       {Read("x", x), Read("scale", scale), Read("group_sizes", group_sizes),
                        Read("output", out), Read("colwise_output", colwise_out),
                        Read("scale_inv", scale_inv), Read("colwise_scale_inv", colwise_scale_inv),
                        Read("updated_amax", amax)});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // x
        .Arg<xffi::AnyBuffer>()  // scale
        .Arg<xffi::AnyBuffer>()  // group_sizes
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // colwise_output
        .Ret<xffi::AnyBuffer>()  // scale_inv
        .Ret<xffi::AnyBuffer>()  // colwise_scale_inv
        .Ret<xffi::AnyBuffer>()  // updated_amax
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attrs());

const Registration kGrouped({"te_ffi_kernels.grouped_quantize", nullptr, kGroupedExecute,
                             "Which loops run depends on group_sizes, which are read on the host "
                             "while the call runs, as Transformer Engine does on GPU, where it "
                             "synchronises the stream; the kernels for CUDA here read them on the "
                             "device, and are warmed up"});

}  // namespace
}  // namespace jaxtap::ffi
