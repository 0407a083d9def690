// Handlers of act_lu and dact_dbias_quantize. Sums for a bias go with all activations here.

#include <vector>

#include "activations/activations.h"
#include "ffi/call.h"
#include "ffi/te_activation_call.h"
#include "ffi/te_outputs.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using Config = ActivationConfig;

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

void WarmForward(const Config& config) {
  WarmSource<activations::Activated>(config, kSide, false);
}

void Forward(const ActivationCall& given, const Parallel& parallel) {
  const activations::Operands operands = OperandsOf(given.config, given.x, given.rows);
  RunOutputs(given.outputs, activations::Activated(operands), nullptr, parallel);
}

void WarmBackward(const ActivationGradientConfig& config) {
  WarmSource<activations::Derived>(config, config.parts() * kSide, config.is_dbias);
}

void Backward(const ActivationGradientCall& given, const Parallel& parallel) {
  const bool is_dbias = given.config.is_dbias;
  if (!is_dbias) Clear({given.dbias});
  activations::Operands operands = OperandsOf(given.config, given.x, given.rows);
  operands.dz = given.dz.data;
  RunOutputs(given.outputs, activations::Derived(operands), is_dbias ? given.dbias.data : nullptr,
             parallel);
}

const Handlers<ActivationCall, WarmForward, Forward> kForward;
const Handlers<ActivationGradientCall, WarmBackward, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
