// Handlers of norm_forward and norm_backward, with Transformer Engine's arguments, results and
// attributes. sm_margin and the workspaces are not used.

#include <vector>

#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_norm_call.h"
#include "ffi/te_outputs.h"
#include "ffi/threads.h"
#include "norms/norms.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using norms::Kind;

constexpr char kForward[] = "te_ffi_kernels.norm_forward";
constexpr char kBackward[] = "te_ffi_kernels.norm_backward";
constexpr int64_t kSide = te::kTile;

void WarmForward(const NormForwardConfig& config) {
  std::vector<float> x(kSide * kSide, 1.0f), mean(kSide), rsigma(kSide), out(kSide * kSide);
  norms::Norm norm;
  norm.kind = config.kind;
  norm.epsilon = 1.0f;
  norm.x = norm.gamma = norm.beta = x.data();
  norm.rows = norm.cols = kSide;
  norm.mean = mean.data();
  norm.rsigma = rsigma.data();
  const norms::Normalized source(norm, config.output.cuts(), Parallel());
  te::Quantize args;
  args.source = &source;
  args.rows = args.cols = kSide;
  args.scaling = te::Scaling::kNone;
  args.out = out.data();
  te::quantize(args, Parallel());
  if (config.output.quantizes()) {
    te::warm_quantize(config.output.scaling, te::has_rowwise(config.output.layout),
                      te::has_colwise(config.output.layout), false);
  }
}

void ExecuteForward(const NormForwardConfig& config, xffi::ThreadPool pool,
                    const NormForwardCall& call) {
  const Matrix matrix = call.Check(config);
  if (config.kind != Kind::kLayer) Clear({call.mu});
  const norms::Norm norm = call.Args(config, matrix);
  XlaScheduler scheduler(pool);
  const Parallel parallel(scheduler);
  const norms::Normalized source(norm, config.output.cuts(), parallel);
  RunOutputs(config.output, source, call.x.dtype, matrix, call.scale, call.amax, call.outputs,
             nullptr, parallel);
}

XLA_FFI_DEFINE_HANDLER(
    kForwardInstantiate,
    [](int64_t norm_type, bool zero_centered_gamma, double epsilon, int64_t, int64_t scaling_mode,
       int64_t quantize_layout, bool output_amax_when_no_scaling) {
      return Warmed(kForward, [&] {
        WarmForward({norm_type, zero_centered_gamma, epsilon, scaling_mode, quantize_layout,
                     output_amax_when_no_scaling});
      });
    },
    xffi::Ffi::BindInstantiate()
        .Attr<int64_t>("norm_type")
        .Attr<bool>("zero_centered_gamma")
        .Attr<double>("epsilon")
        .Attr<int64_t>("sm_margin")
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("quantize_layout")
        .Attr<bool>("output_amax_when_no_scaling"));

XLA_FFI_DEFINE_HANDLER(
    kForwardExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer scale, xffi::AnyBuffer amax,
       xffi::AnyBuffer gamma, xffi::AnyBuffer beta, xffi::Result<xffi::AnyBuffer> out,
       xffi::Result<xffi::AnyBuffer> colwise_out, xffi::Result<xffi::AnyBuffer> scale_inv,
       xffi::Result<xffi::AnyBuffer> colwise_scale_inv, xffi::Result<xffi::AnyBuffer> updated_amax,
       xffi::Result<xffi::AnyBuffer> mu, xffi::Result<xffi::AnyBuffer> rsigma,
       xffi::Result<xffi::AnyBuffer>, int64_t norm_type, bool zero_centered_gamma, double epsilon,
       int64_t, int64_t scaling_mode, int64_t quantize_layout, bool output_amax_when_no_scaling) {
      return Guarded(kForward, [&] {
        ExecuteForward({norm_type, zero_centered_gamma, epsilon, scaling_mode, quantize_layout,
                        output_amax_when_no_scaling},
                       pool,
                       {Read("x", x), Read("scale", scale), Read("amax", amax),
                        Read("gamma", gamma), Read("beta", beta),
                        {Read("output", out), Read("colwise_output", colwise_out),
                         Read("scale_inv", scale_inv),
                         Read("colwise_scale_inv", colwise_scale_inv),
                         Read("updated_amax", updated_amax)},
                        Read("mu", mu), Read("rsigma", rsigma)});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // x
        .Arg<xffi::AnyBuffer>()  // scale
        .Arg<xffi::AnyBuffer>()  // amax
        .Arg<xffi::AnyBuffer>()  // gamma
        .Arg<xffi::AnyBuffer>()  // beta, not read for RMS
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // colwise_output
        .Ret<xffi::AnyBuffer>()  // scale_inv
        .Ret<xffi::AnyBuffer>()  // colwise_scale_inv
        .Ret<xffi::AnyBuffer>()  // updated_amax
        .Ret<xffi::AnyBuffer>()  // mu, zeros for RMS
        .Ret<xffi::AnyBuffer>()  // rsigma
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attr<int64_t>("norm_type")
        .Attr<bool>("zero_centered_gamma")
        .Attr<double>("epsilon")
        .Attr<int64_t>("sm_margin")
        .Attr<int64_t>("scaling_mode")
        .Attr<int64_t>("quantize_layout")
        .Attr<bool>("output_amax_when_no_scaling"));

const Registration kForwardRegistration({kForward, kForwardInstantiate, kForwardExecute});

void WarmBackward(int64_t norm_type, bool zero_centered) {
  std::vector<float> x(kSide * kSide, 1.0f), dx(kSide * kSide), dgamma(kSide), dbeta(kSide);
  norms::Gradient args;
  args.kind = norms::kind_of(norm_type);
  args.zero_centered = zero_centered;
  args.dz = args.x = args.gamma = x.data();
  args.mean = args.rsigma = x.data();
  args.rows = args.cols = kSide;
  args.dx = dx.data();
  args.dgamma = dgamma.data();
  args.dbeta = dbeta.data();
  norms::backward(args, Parallel());
}

void ExecuteBackward(int64_t norm_type, bool zero_centered, xffi::ThreadPool pool,
                     const NormBackwardCall& call) {
  const norms::Gradient args = call.Args(norms::kind_of(norm_type), zero_centered);
  if (args.kind != Kind::kLayer) Clear({call.dbeta});
  XlaScheduler scheduler(pool);
  norms::backward(args, Parallel(scheduler));
}

XLA_FFI_DEFINE_HANDLER(kBackwardInstantiate,
                       [](int64_t norm_type, bool zero_centered_gamma, int64_t) {
                         return Warmed(kBackward,
                                       [&] { WarmBackward(norm_type, zero_centered_gamma); });
                       },
                       xffi::Ffi::BindInstantiate()
                           .Attr<int64_t>("norm_type")
                           .Attr<bool>("zero_centered_gamma")
                           .Attr<int64_t>("sm_margin"));

XLA_FFI_DEFINE_HANDLER(
    kBackwardExecute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer dz, xffi::AnyBuffer x, xffi::AnyBuffer mu,
       xffi::AnyBuffer rsigma, xffi::AnyBuffer gamma, xffi::Result<xffi::AnyBuffer> dx,
       xffi::Result<xffi::AnyBuffer> dgamma, xffi::Result<xffi::AnyBuffer> dbeta,
       xffi::Result<xffi::AnyBuffer>, int64_t norm_type, bool zero_centered_gamma, int64_t) {
      return Guarded(kBackward, [&] {
        ExecuteBackward(norm_type, zero_centered_gamma, pool,
                        {Read("dz", dz), Read("x", x), Read("mu", mu), Read("rsigma", rsigma),
                         Read("gamma", gamma), Read("dx", dx), Read("dgamma", dgamma),
                         Read("dbeta", dbeta)});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // dz
        .Arg<xffi::AnyBuffer>()  // x
        .Arg<xffi::AnyBuffer>()  // mu, not read for RMS
        .Arg<xffi::AnyBuffer>()  // rsigma
        .Arg<xffi::AnyBuffer>()  // gamma
        .Ret<xffi::AnyBuffer>()  // dx
        .Ret<xffi::AnyBuffer>()  // dgamma
        .Ret<xffi::AnyBuffer>()  // dbeta, zeros for RMS
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attr<int64_t>("norm_type")
        .Attr<bool>("zero_centered_gamma")
        .Attr<int64_t>("sm_margin"));

const Registration kBackwardRegistration({kBackward, kBackwardInstantiate, kBackwardExecute});

}  // namespace
}  // namespace jaxtap::ffi
