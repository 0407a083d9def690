// Handlers of act_lu and dact_dbias_quantize. Sums for a bias go with all activations here.

#include "activations/activations.h"
#include "ffi/call.h"
#include "ffi/te_activation_call.h"
#include "ffi/te_outputs.h"

namespace jaxtap::ffi {
namespace {

activations::Operands OperandsOf(const ActivationConfig& config, const Array& x, const Matrix& rows) {
  activations::Operands operands;
  operands.activation = config.activation;
  operands.params = config.params;
  operands.x = x.data;
  operands.dtype = te::float_of(x.dtype);
  operands.cols = rows.cols;
  return operands;
}

void Forward(const ActivationCall& given, const Parallel& parallel) {
  const activations::Operands operands = OperandsOf(given.config, given.x, given.rows);
  RunOutputs(given.outputs, activations::Activated(operands), nullptr, parallel);
}

void Backward(const ActivationGradientCall& given, const Parallel& parallel) {
  const bool is_dbias = given.config.is_dbias;
  if (!is_dbias) Clear({given.dbias});
  activations::Operands operands = OperandsOf(given.config, given.x, given.rows);
  operands.dz = given.dz.data;
  RunOutputs(given.outputs, activations::Derived(operands), is_dbias ? given.dbias.data : nullptr,
             parallel);
}

const Handlers<ActivationCall, Forward> kForward;
const Handlers<ActivationGradientCall, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
