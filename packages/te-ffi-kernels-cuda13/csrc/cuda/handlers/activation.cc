// Handlers of act_lu and dact_dbias_quantize.

#include "cuda/kernels/activation.h"

#include "cuda/handlers/outputs.h"
#include "cuda/handlers/sums.h"
#include "ffi/te_activation_call.h"

namespace jaxtap::cuda {
namespace {

Activation ActivationOf(const ffi::ActivationConfig& config, const Array& x,
                        const ffi::Matrix& rows) {
  Activation args;
  args.function = config.activation.function;
  args.gated = config.activation.gated;
  args.params = config.params;
  args.x = x.data;
  args.dtype = te::float_of(x.dtype);
  args.rows = rows.rows;
  args.cols = rows.cols;
  return args;
}

void Forward(const ffi::ActivationCall& given, const Call& call) {
  activation_forward(ActivationOf(given.config, given.x, given.rows),
                     OutputsOf(call, given.outputs), call.stream);
}

void Backward(const ffi::ActivationGradientCall& given, const Call& call) {
  Activation args = ActivationOf(given.config, given.x, given.rows);
  args.dz = given.dz.data;
  Quantize outputs = OutputsOf(call, given.outputs);
  if (given.config.is_dbias) {
    outputs.sums = given.dbias.data;
  } else {
    call.Clear({given.dbias});
  }
  const int64_t summed = outputs.sums == nullptr ? 0 : outputs.cols;
  outputs.parts = PartsOfSums(call, outputs.rows, summed, 1);
  activation_backward(args, outputs, call.stream);
}

const Handlers<ffi::ActivationCall, Forward> kForward;
const Handlers<ffi::ActivationGradientCall, Backward, Workspace::kIs> kBackward;

}  // namespace
}  // namespace jaxtap::cuda
