// Handlers of norm_forward and norm_backward, with Transformer Engine's arguments, results and
// attributes. sm_margin and the workspaces are not used.

#include <vector>

#include "ffi/call.h"
#include "ffi/te_norm_call.h"
#include "ffi/te_outputs.h"
#include "norms/norms.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using norms::Kind;

constexpr char kForward[] = "te_ffi_kernels.norm_forward";
constexpr char kBackward[] = "te_ffi_kernels.norm_backward";
constexpr int64_t kSide = te::kTile;

void WarmForward(const Attributes& attributes) {
  const NormForwardConfig config = NormForwardConfigOf(attributes);
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

void Forward(const Call& call) {
  call.NeedCounts(5, 8);  // the last result is a workspace, which isn't used
  const NormForwardConfig config = NormForwardConfigOf(call.attributes);
  const NormForwardCall given = {
      call.Operand(0, "x"),
      call.Operand(1, "scale"),
      call.Operand(2, "amax"),
      call.Operand(3, "gamma"),
      call.Operand(4, "beta"),  // not read for RMS
      ReadOutputs(call),
      call.Result(5, "mu"),  // zeros for RMS
      call.Result(6, "rsigma")};
  const Matrix matrix = given.Check(config);
  if (config.kind != Kind::kLayer) Clear({given.mu});
  const norms::Norm norm = given.Args(config, matrix);
  XlaScheduler scheduler(call);
  const Parallel parallel(scheduler);
  const norms::Normalized source(norm, config.output.cuts(), parallel);
  RunOutputs(config.output, source, given.x.dtype, matrix, given.scale, given.amax, given.outputs,
             nullptr, parallel);
}

void WarmBackward(const Attributes& attributes) {
  std::vector<float> x(kSide * kSide, 1.0f), dx(kSide * kSide), dgamma(kSide), dbeta(kSide);
  norms::Gradient args;
  args.kind = norms::kind_of(NeedAttribute<int64_t>(attributes, "norm_type"));
  args.zero_centered = NeedAttribute<bool>(attributes, "zero_centered_gamma");
  args.dz = args.x = args.gamma = x.data();
  args.mean = args.rsigma = x.data();
  args.rows = args.cols = kSide;
  args.dx = dx.data();
  args.dgamma = dgamma.data();
  args.dbeta = dbeta.data();
  norms::backward(args, Parallel());
}

void Backward(const Call& call) {
  call.NeedCounts(5, 4);  // the last result is a workspace, which isn't used
  const NormBackwardCall given = {call.Operand(0, "dz"),    call.Operand(1, "x"),
                                  call.Operand(2, "mu"),  // not read for RMS
                                  call.Operand(3, "rsigma"), call.Operand(4, "gamma"),
                                  call.Result(0, "dx"),     call.Result(1, "dgamma"),
                                  call.Result(2, "dbeta")};  // zeros for RMS
  const norms::Gradient args =
      given.Args(norms::kind_of(NeedAttribute<int64_t>(call.attributes, "norm_type")),
                 NeedAttribute<bool>(call.attributes, "zero_centered_gamma"));
  if (args.kind != Kind::kLayer) Clear({given.dbeta});
  XlaScheduler scheduler(call);
  norms::backward(args, Parallel(scheduler));
}

const Handlers<kForward, WarmForward, Forward> kOne;
const Handlers<kBackward, WarmBackward, Backward> kTwo;

}  // namespace
}  // namespace jaxtap::ffi
