// Handlers of quantize_int8.

#include <vector>

#include "ffi/call.h"
#include "ffi/quantize_int8_call.h"

namespace jaxtap::ffi {
namespace {

void Warm(const QuantizeInt8Config& config) {
  constexpr int64_t kSide = 16;
  const std::vector<float> x(kSide * kSide, 1.0f);
  const uint32_t key[2] = {};
  std::vector<int8_t> out(x.size());
  float scales[kSide];
  training::Args args;
  args.rows = args.columns = kSide;
  args.by_row = config.by_row;
  args.noise = config.noise;
  args.x = x.data();
  if (config.factors) args.factors = x.data();
  if (config.noise == training::Noise::kGiven) {
    args.given = x.data();
  } else if (config.noise != training::Noise::kNone) {
    args.keys = key;
  }
  args.out = out.data();
  args.scales = scales;
  training::quantize_int8(args, Parallel());
}

void Run(const QuantizeInt8Call& given, const Parallel& parallel) {
  training::quantize_int8(given.args, parallel);
}

const Handlers<QuantizeInt8Call, Warm, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
