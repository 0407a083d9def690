// Handlers of norm_forward and norm_backward.

#include "cuda/kernels/norm.h"

#include "cuda/handlers/outputs.h"
#include "cuda/handlers/sums.h"
#include "ffi/te_norm_call.h"

namespace jaxtap::cuda {
namespace {

void Forward(const ffi::NormForwardCall& given, const Call& call) {
  Norm norm{given.args};
  if (!given.config.is_layer()) {
    call.Clear({given.mu});
  } else if (given.config.output.quantizes()) {
    const Array workspace = call.Memory(DType::F32);
    NeedSize(workspace, norm.rows, "one for each row of x");
    norm.rest = static_cast<float*>(workspace.data);
  }
  norm_forward(norm, OutputsOf(call, given.outputs), call.stream);
}

void Backward(const ffi::NormBackwardCall& given, const Call& call) {
  if (!given.config.is_layer()) call.Clear({given.dbeta});
  NormGradient args{given.args};
  args.parts = PartsOfSums(call, args.rows, args.cols, 2);
  norm_backward(args, call.stream);
}

const Handlers<ffi::NormForwardCall, Forward> kForward;
const Handlers<ffi::NormBackwardCall, Backward, Workspace::kIs> kBackward;

}  // namespace
}  // namespace jaxtap::cuda
