// Handlers of act_lu and dact_dbias_quantize.

#include "cuda/kernels/activation.h"

#include "cuda/handlers/handler.h"
#include "cuda/handlers/outputs.h"
#include "ffi/attributes.h"
#include "ffi/te_activation_call.h"

namespace jaxtap::cuda {
namespace {

using ffi::NeedAttribute;

constexpr char kForward[] = "te_ffi_kernels.act_lu";
constexpr char kBackward[] = "te_ffi_kernels.dact_dbias_quantize";

ffi::Outputs OutputsFrom(const Call& call) {
  return {call.Result(0, "output"), call.Result(1, "colwise_output"), call.Result(2, "scale_inv"),
          call.Result(3, "colwise_scale_inv"), call.Result(4, "updated_amax")};
}

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

void CheckForward(const xffi::Dictionary& attributes) { ffi::ActivationConfig{attributes}; }

void Forward(const Call& call) {
  call.NeedCounts(3, 5);
  const ffi::ActivationConfig config(call.attributes);
  const ffi::ActivationCall given = {call.Operand(0, "x"), call.Operand(1, "scale"),
                                     call.Operand(2, "amax"), OutputsFrom(call)};
  const ffi::Matrix matrix = given.Check(config);
  const Quantize outputs = OutputsOf(call, config.output, given.x.dtype, matrix, given.scale,
                                     given.amax, given.outputs);
  activation_forward(ActivationOf(config, given.x, matrix), outputs, call.stream);
}

void CheckBackward(const xffi::Dictionary& attributes) {
  ffi::ActivationConfig{attributes};
  NeedAttribute<bool>(attributes, "is_dbias");
}

void Backward(const Call& call) {
  call.NeedCounts(4, 7);  // the last result is a workspace, which isn't used
  const ffi::ActivationConfig config(call.attributes);
  const bool is_dbias = NeedAttribute<bool>(call.attributes, "is_dbias");
  const ffi::ActivationGradientCall given = {call.Operand(0, "dz"),    call.Operand(1, "x"),
                                             call.Operand(2, "scale"), call.Operand(3, "amax"),
                                             OutputsFrom(call),        call.Result(5, "dbias")};
  const auto [rows, matrix] = given.Check(config, is_dbias);
  Activation args = ActivationOf(config, given.x, rows);
  args.dz = given.dz.data;
  Quantize outputs = OutputsOf(call, config.output, given.x.dtype, matrix, given.scale, given.amax,
                               given.outputs);
  if (is_dbias) {
    outputs.sums = given.dbias.data;
  } else {
    call.Clear({given.dbias});
  }
  activation_backward(args, outputs, call.stream);
}

const Handlers<kForward, CheckForward, Forward> kOne;
const Handlers<kBackward, CheckBackward, Backward> kTwo;

}  // namespace
}  // namespace jaxtap::cuda
