// Handlers of norm_forward and norm_backward.

#include "cuda/kernels/norm.h"

#include "cuda/handlers/handler.h"
#include "cuda/handlers/outputs.h"
#include "ffi/attributes.h"
#include "ffi/te_norm_call.h"

namespace jaxtap::cuda {
namespace {

using ffi::NeedAttribute;
using norms::Kind;

constexpr char kForward[] = "te_ffi_kernels.norm_forward";
constexpr char kBackward[] = "te_ffi_kernels.norm_backward";

void CheckForward(const xffi::Dictionary& attributes) {
  ffi::NormForwardConfigOf(attributes);
}

void Forward(const Call& call) {
  call.NeedCounts(5, 8);
  const ffi::NormForwardConfig config = ffi::NormForwardConfigOf(call.attributes);
  const ffi::NormForwardCall given = {
      call.Operand(0, "x"),
      call.Operand(1, "scale"),
      call.Operand(2, "amax"),
      call.Operand(3, "gamma"),
      call.Operand(4, "beta"),
      {call.Result(0, "output"), call.Result(1, "colwise_output"), call.Result(2, "scale_inv"),
       call.Result(3, "colwise_scale_inv"), call.Result(4, "updated_amax")},
      call.Result(5, "mu"),
      call.Result(6, "rsigma")};
  const ffi::Matrix matrix = given.Check(config);
  Norm norm{given.Args(config, matrix)};
  if (config.kind != Kind::kLayer) {
    call.Clear({given.mu});
  } else if (config.output.quantizes()) {
    const Array workspace = call.Result(7, "workspace");
    NeedSize(workspace.NeedDtype({DType::F32}), matrix.rows, "one for each row of x");
    norm.rest = static_cast<float*>(workspace.data);
  }
  const Quantize outputs = OutputsOf(call, config.output, given.x.dtype, matrix, given.scale,
                                     given.amax, given.outputs);
  norm_forward(norm, outputs, call.stream);
}

void CheckBackward(const xffi::Dictionary& attributes) {
  norms::kind_of(NeedAttribute<int64_t>(attributes, "norm_type"));
  NeedAttribute<bool>(attributes, "zero_centered_gamma");
}

void Backward(const Call& call) {
  call.NeedCounts(5, 4);  // the last result is a workspace, which isn't used
  const ffi::NormBackwardCall given = {call.Operand(0, "dz"),      call.Operand(1, "x"),
                                       call.Operand(2, "mu"),      call.Operand(3, "rsigma"),
                                       call.Operand(4, "gamma"),   call.Result(0, "dx"),
                                       call.Result(1, "dgamma"),   call.Result(2, "dbeta")};
  const NormGradient args =
      given.Args(norms::kind_of(NeedAttribute<int64_t>(call.attributes, "norm_type")),
                 NeedAttribute<bool>(call.attributes, "zero_centered_gamma"));
  if (args.kind != Kind::kLayer) call.Clear({given.dbeta});
  norm_backward(args, call.stream);
}

const Handlers<kForward, CheckForward, Forward> kOne;
const Handlers<kBackward, CheckBackward, Backward> kTwo;

}  // namespace
}  // namespace jaxtap::cuda
