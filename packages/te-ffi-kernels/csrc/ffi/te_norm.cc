// Handlers of norm_forward and norm_backward.

#include <vector>

#include "ffi/call.h"
#include "ffi/te_norm_call.h"
#include "ffi/te_outputs.h"
#include "norms/norms.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

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

void Forward(const NormForwardCall& given, const Parallel& parallel) {
  if (!given.config.is_layer()) Clear({given.mu});
  const norms::Normalized source(given.args, given.config.output.cuts(), parallel);
  RunOutputs(given.outputs, source, nullptr, parallel);
}

void WarmBackward(const NormConfig& config) {
  std::vector<float> x(kSide * kSide, 1.0f), dx(kSide * kSide), dgamma(kSide), dbeta(kSide);
  norms::Gradient args;
  args.kind = config.kind;
  args.zero_centered = config.zero_centered;
  args.dz = args.x = args.gamma = x.data();
  args.mean = args.rsigma = x.data();
  args.rows = args.cols = kSide;
  args.dx = dx.data();
  args.dgamma = dgamma.data();
  args.dbeta = dbeta.data();
  norms::backward(args, Parallel());
}

void Backward(const NormBackwardCall& given, const Parallel& parallel) {
  if (!given.config.is_layer()) Clear({given.dbeta});
  norms::backward(given.args, parallel);
}

const Handlers<NormForwardCall, WarmForward, Forward> kForward;
const Handlers<NormBackwardCall, WarmBackward, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
