// Handlers of act_lu and dact_dbias_quantize, with Transformer Engine's arguments, results and
// attributes. Sums for a bias go with all activations here.

#include <vector>

#include "activations/activations.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_activation_call.h"
#include "ffi/te_outputs.h"
#include "ffi/threads.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using Config = ActivationConfig;

constexpr char kForward[] = "te_ffi_kernels.act_lu";
constexpr char kBackward[] = "te_ffi_kernels.dact_dbias_quantize";
constexpr int64_t kSide = te::kTile;

// One run on floats, and one of the quantizer's loops.
template <class Source>
void Warm(const Config& config, int64_t cols, bool sums) {
  std::vector<float> x(2 * kSide * kSide, 1.0f), out(2 * kSide * kSide);
  activations::Operands operands;
  operands.activation = config.activation;
  operands.params = config.params;
  operands.dz = operands.x = x.data();
  operands.cols = kSide;
  const Source source(operands);
  te::Quantize args;
  args.source = &source;
  args.rows = kSide;
  args.cols = cols;
  args.scaling = te::Scaling::kNone;
  args.out = out.data();
  te::quantize(args, Parallel());
  if (config.output.quantizes()) {
    te::warm_quantize(config.output.scaling, te::has_rowwise(config.output.layout),
                      te::has_colwise(config.output.layout), sums);
  }
}

activations::Operands OperandsOf(const Config& config, const Array& x, const Matrix& rows) {
  activations::Operands operands;
  operands.activation = config.activation;
  operands.params = config.params;
  operands.x = x.data;
  operands.dtype = te::float_of(x.dtype);
  operands.cols = rows.cols;
  return operands;
}

void ExecuteForward(const Config& config, xffi::ThreadPool pool, const ActivationCall& call) {
  const Matrix matrix = call.Check(config);
  const activations::Operands operands = OperandsOf(config, call.x, matrix);
  const activations::Activated source(operands);
  XlaScheduler scheduler(pool);
  RunOutputs(config.output, source, call.x.dtype, matrix, call.scale, call.amax, call.outputs,
             nullptr, Parallel(scheduler));
}

void ExecuteBackward(const Config& config, bool is_dbias, xffi::ThreadPool pool,
                     const ActivationGradientCall& call) {
  const auto [rows, matrix] = call.Check(config, is_dbias);
  if (!is_dbias) Clear({call.dbias});
  activations::Operands operands = OperandsOf(config, call.x, rows);
  operands.dz = call.dz.data;
  const activations::Derived source(operands);
  XlaScheduler scheduler(pool);
  RunOutputs(config.output, source, call.x.dtype, matrix, call.scale, call.amax, call.outputs,
             is_dbias ? call.dbias.data : nullptr, Parallel(scheduler));
}

XLA_FFI_DEFINE_HANDLER(
    kForwardInstantiate,
    [](int64_t act_enum, int64_t scaling_mode, int64_t quantize_layout,
       xffi::Dictionary act_params, bool output_amax_when_no_scaling) {
      return Warmed(kForward, [&] {
        Warm<activations::Activated>({act_enum, scaling_mode, quantize_layout, act_params,
                                      output_amax_when_no_scaling},
                                     kSide, false);
      });
    },
    xffi::Ffi::BindInstantiate()
        .Attr<int64_t>("act_enum")
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("quantize_layout")
        .Attr<xffi::Dictionary>("act_params")
        .Attr<bool>("output_amax_when_no_scaling"));

XLA_FFI_DEFINE_HANDLER(
    kForwardExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer scale, xffi::AnyBuffer amax,
       xffi::Result<xffi::AnyBuffer> out, xffi::Result<xffi::AnyBuffer> colwise_out,
       xffi::Result<xffi::AnyBuffer> scale_inv, xffi::Result<xffi::AnyBuffer> colwise_scale_inv,
       xffi::Result<xffi::AnyBuffer> updated_amax, int64_t act_enum, int64_t scaling_mode,
       int64_t quantize_layout, xffi::Dictionary act_params, bool output_amax_when_no_scaling) {
      return Guarded(kForward, [&] {
        ExecuteForward(
            {act_enum, scaling_mode, quantize_layout, act_params, output_amax_when_no_scaling},
            pool,
            {Read("x", x), Read("scale", scale), Read("amax", amax),
             {Read("output", out), Read("colwise_output", colwise_out),
              Read("scale_inv", scale_inv), Read("colwise_scale_inv", colwise_scale_inv),
              Read("updated_amax", updated_amax)}});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // x
        .Arg<xffi::AnyBuffer>()  // scale
        .Arg<xffi::AnyBuffer>()  // amax
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // colwise_output
        .Ret<xffi::AnyBuffer>()  // scale_inv
        .Ret<xffi::AnyBuffer>()  // colwise_scale_inv
        .Ret<xffi::AnyBuffer>()  // updated_amax
        .Attr<int64_t>("act_enum")
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("quantize_layout")
        .Attr<xffi::Dictionary>("act_params")
        .Attr<bool>("output_amax_when_no_scaling"));

const Registration kForwardRegistration({kForward, kForwardInstantiate, kForwardExecute});

XLA_FFI_DEFINE_HANDLER(
    kBackwardInstantiate,
    [](int64_t scaling_mode, int64_t act_enum, int64_t quantize_layout, bool is_dbias,
       xffi::Dictionary act_params, bool output_amax_when_no_scaling) {
      return Warmed(kBackward, [&] {
        const Config config(act_enum, scaling_mode, quantize_layout, act_params,
                            output_amax_when_no_scaling);
        Warm<activations::Derived>(config, config.parts() * kSide, is_dbias);
      });
    },
    xffi::Ffi::BindInstantiate()
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("act_enum")
        .Attr<int64_t>("quantize_layout")
        .Attr<bool>("is_dbias")
        .Attr<xffi::Dictionary>("act_params")
        .Attr<bool>("output_amax_when_no_scaling"));

XLA_FFI_DEFINE_HANDLER(
    kBackwardExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer dz, xffi::AnyBuffer x, xffi::AnyBuffer scale,
       xffi::AnyBuffer amax, xffi::Result<xffi::AnyBuffer> out,
       xffi::Result<xffi::AnyBuffer> colwise_out, xffi::Result<xffi::AnyBuffer> scale_inv,
       xffi::Result<xffi::AnyBuffer> colwise_scale_inv, xffi::Result<xffi::AnyBuffer> updated_amax,
       xffi::Result<xffi::AnyBuffer> dbias, xffi::Result<xffi::AnyBuffer>, int64_t scaling_mode,
       int64_t act_enum, int64_t quantize_layout, bool is_dbias, xffi::Dictionary act_params,
       bool output_amax_when_no_scaling) {
      return Guarded(kBackward, [&] {
        ExecuteBackward(
            {act_enum, scaling_mode, quantize_layout, act_params, output_amax_when_no_scaling},
            is_dbias, pool,
            {Read("dz", dz), Read("x", x), Read("scale", scale), Read("amax", amax),
             {Read("output", out), Read("colwise_output", colwise_out),
              Read("scale_inv", scale_inv), Read("colwise_scale_inv", colwise_scale_inv),
              Read("updated_amax", updated_amax)},
             Read("dbias", dbias)});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // dz
        .Arg<xffi::AnyBuffer>()  // x
        .Arg<xffi::AnyBuffer>()  // scale
        .Arg<xffi::AnyBuffer>()  // amax
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // colwise_output
        .Ret<xffi::AnyBuffer>()  // scale_inv
        .Ret<xffi::AnyBuffer>()  // colwise_scale_inv
        .Ret<xffi::AnyBuffer>()  // updated_amax
        .Ret<xffi::AnyBuffer>()  // dbias
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("act_enum")
        .Attr<int64_t>("quantize_layout")
        .Attr<bool>("is_dbias")
        .Attr<xffi::Dictionary>("act_params")
        .Attr<bool>("output_amax_when_no_scaling"));

const Registration kBackwardRegistration({kBackward, kBackwardInstantiate, kBackwardExecute});

}  // namespace
}  // namespace jaxtap::ffi
