// Handlers of norm_forward and norm_backward.

#include "ffi/call.h"
#include "ffi/te_norm_call.h"
#include "ffi/te_outputs.h"
#include "norms/norms.h"

namespace jaxtap::ffi {
namespace {

void Forward(const NormForwardCall& given, const Parallel& parallel) {
  if (!given.config.is_layer()) Clear({given.mu});
  const norms::Normalized source(given.args, given.config.output.cuts(), parallel);
  RunOutputs(given.outputs, source, nullptr, parallel);
}

void Backward(const NormBackwardCall& given, const Parallel& parallel) {
  if (!given.config.is_layer()) Clear({given.dbeta});
  norms::backward(given.args, parallel);
}

const Handlers<NormForwardCall, Forward> kForward;
const Handlers<NormBackwardCall, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
