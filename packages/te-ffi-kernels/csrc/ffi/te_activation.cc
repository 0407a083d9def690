// Handlers of act_lu and dact_dbias_quantize, with Transformer Engine's arguments, results and
// attributes. Sums for a bias go with all activations here.

#include <vector>

#include "activations/activations.h"
#include "ffi/call.h"
#include "ffi/te_activation_call.h"
#include "ffi/te_outputs.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using Config = ActivationConfig;

constexpr char kForward[] = "te_ffi_kernels.act_lu";
constexpr char kBackward[] = "te_ffi_kernels.dact_dbias_quantize";
constexpr int64_t kSide = te::kTile;

// One run on floats, and one of the quantizer's loops.
template <class Source>
void WarmSource(const Config& config, int64_t cols, bool sums) {
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

activations::Operands OperandsOf(const Config& config, const Array& x, const Matrix& rows) {
  activations::Operands operands;
  operands.activation = config.activation;
  operands.params = config.params;
  operands.x = x.data;
  operands.dtype = te::float_of(x.dtype);
  operands.cols = rows.cols;
  return operands;
}

void WarmForward(const Attributes& attributes) {
  WarmSource<activations::Activated>(Config(attributes), kSide, false);
}

void Forward(const Call& call) {
  call.NeedCounts(3, 5);
  const Config config(call.attributes);
  const ActivationCall given = {call.Operand(0, "x"), call.Operand(1, "scale"),
                                call.Operand(2, "amax"), ReadOutputs(call)};
  const Matrix matrix = given.Check(config);
  const activations::Operands operands = OperandsOf(config, given.x, matrix);
  const activations::Activated source(operands);
  XlaScheduler scheduler(call);
  RunOutputs(config.output, source, given.x.dtype, matrix, given.scale, given.amax, given.outputs,
             nullptr, Parallel(scheduler));
}

void WarmBackward(const Attributes& attributes) {
  const Config config(attributes);
  WarmSource<activations::Derived>(config, config.parts() * kSide,
                                   NeedAttribute<bool>(attributes, "is_dbias"));
}

void Backward(const Call& call) {
  call.NeedCounts(4, 7);  // the last result is a workspace, which isn't used
  const Config config(call.attributes);
  const bool is_dbias = NeedAttribute<bool>(call.attributes, "is_dbias");
  const ActivationGradientCall given = {call.Operand(0, "dz"),    call.Operand(1, "x"),
                                        call.Operand(2, "scale"), call.Operand(3, "amax"),
                                        ReadOutputs(call),        call.Result(5, "dbias")};
  const auto [rows, matrix] = given.Check(config, is_dbias);
  if (!is_dbias) Clear({given.dbias});
  activations::Operands operands = OperandsOf(config, given.x, rows);
  operands.dz = given.dz.data;
  const activations::Derived source(operands);
  XlaScheduler scheduler(call);
  RunOutputs(config.output, source, given.x.dtype, matrix, given.scale, given.amax, given.outputs,
             is_dbias ? given.dbias.data : nullptr, Parallel(scheduler));
}

const Handlers<kForward, WarmForward, Forward> kOne;
const Handlers<kBackward, WarmBackward, Backward> kTwo;

}  // namespace
}  // namespace jaxtap::ffi
