// Handlers of act_lu and dact_dbias_quantize, with Transformer Engine's arguments, results and
// attributes. Sums for a bias go with all activations here.

#include <vector>

#include "activations/activations.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_arguments.h"
#include "ffi/te_outputs.h"
#include "ffi/threads.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using activations::Activation;
using activations::Params;

constexpr char kForward[] = "te_ffi_kernels.act_lu";
constexpr char kBackward[] = "te_ffi_kernels.dact_dbias_quantize";
constexpr int64_t kSide = te::kTile;

template <typename T>
T Member(const xffi::Dictionary& dictionary, const char* name) {
  if (dictionary.contains(name)) {
    const auto value = dictionary.get<T>(name);
    if (value.has_value()) return *value;
  }
  throw invalid_argument("act_params has no member ", name, ", or one of another type than it ",
                         "must have: {clamped_swiglu: {limit, alpha, glu_linear_offset}}, of f32");
}

Params ParamsOf(const xffi::Dictionary& act_params) {
  const auto clamped = Member<xffi::Dictionary>(act_params, "clamped_swiglu");
  const Params params = {Member<float>(clamped, "limit"), Member<float>(clamped, "alpha"),
                         Member<float>(clamped, "glu_linear_offset")};
  if (!(params.limit >= 0.0f)) {
    throw invalid_argument("act_params has limit ", params.limit, ", which must be 0 or more");
  }
  return params;
}

struct Config {
  Config(int64_t act_enum, int64_t scaling_mode, int64_t quantize_layout,
         const xffi::Dictionary& act_params, bool output_amax_when_no_scaling)
      : activation(activations::activation_of(act_enum)),
        params(ParamsOf(act_params)),
        output(scaling_mode, quantize_layout, output_amax_when_no_scaling) {}

  int64_t parts() const { return activation.gated ? 2 : 1; }

  Activation activation;
  Params params;
  OutputConfig output;
};

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

// [rows, columns of one part].
Matrix RowsOf(const Config& config, const Array& x) {
  NeedFloat(x);
  const int64_t rank = x.rank();
  if (rank < 2 || x.shape[static_cast<size_t>(rank - 2)] != config.parts()) {
    throw invalid_argument("x is ", x.Text(), ", and its last axis but one must be ",
                           config.parts(), ", as act_enum has it");
  }
  return {x.Product(0, rank - 2), x.shape[static_cast<size_t>(rank - 1)], rank - 2};
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

void ExecuteForward(const Config& config, xffi::ThreadPool pool, const Array& x,
                    const Array& scale, const Array& amax, const Outputs& outputs) {
  const Matrix matrix = RowsOf(config, x);
  CheckOutputs(config.output, x, matrix, scale, amax, outputs);
  const activations::Operands operands = OperandsOf(config, x, matrix);
  const activations::Activated source(operands);
  XlaScheduler scheduler(pool);
  RunOutputs(config.output, source, x.dtype, matrix, scale, amax, outputs, nullptr,
             Parallel(scheduler));
}

void ExecuteBackward(const Config& config, bool is_dbias, xffi::ThreadPool pool, const Array& dz,
                     const Array& x, const Array& scale, const Array& amax,
                     const Outputs& outputs, const Array& dbias) {
  const Matrix rows = RowsOf(config, x);
  const Matrix matrix = {rows.rows, config.parts() * rows.cols, rows.axis};
  NeedSize(dz.NeedDtype({x.dtype}), rows.rows * rows.cols, "one for each result of the activation");
  CheckOutputs(config.output, x, matrix, scale, amax, outputs);
  if (is_dbias) {
    NeedSize(dbias.NeedDtype({x.dtype}), matrix.cols, "one for each column of x");
  } else {
    Clear({dbias});
  }
  activations::Operands operands = OperandsOf(config, x, rows);
  operands.dz = dz.data;
  const activations::Derived source(operands);
  XlaScheduler scheduler(pool);
  RunOutputs(config.output, source, x.dtype, matrix, scale, amax, outputs,
             is_dbias ? dbias.data : nullptr, Parallel(scheduler));
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
            pool, Read("x", x), Read("scale", scale), Read("amax", amax),
            {Read("output", out), Read("colwise_output", colwise_out),
             Read("scale_inv", scale_inv), Read("colwise_scale_inv", colwise_scale_inv),
             Read("updated_amax", updated_amax)});
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
            is_dbias, pool, Read("dz", dz), Read("x", x), Read("scale", scale), Read("amax", amax),
            {Read("output", out), Read("colwise_output", colwise_out),
             Read("scale_inv", scale_inv), Read("colwise_scale_inv", colwise_scale_inv),
             Read("updated_amax", updated_amax)},
            Read("dbias", dbias));
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
