// Handler of dequantize.

#include <vector>

#include "ffi/call.h"
#include "ffi/te_dequantize_call.h"
#include "te/dequantize.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

void Warm(const DequantizeConfig& config) {
  std::vector<uint8_t> qvalues(te::kTile * te::kTile), scales(qvalues.size(), 127);
  std::vector<float> out(qvalues.size());
  te::Dequantize args;
  args.qvalues = qvalues.data();
  args.rows = args.cols = te::kTile;
  args.scaling = config.scaling;
  args.scales = scales.data();
  args.by_column = config.is_colwise;
  args.out = out.data();
  te::dequantize(args, Parallel());
}

void Run(const DequantizeCall& given, const Parallel& parallel) {
  te::dequantize(given.args, parallel);
}

const Handlers<DequantizeCall, Warm, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
