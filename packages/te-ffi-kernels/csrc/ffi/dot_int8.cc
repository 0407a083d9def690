// Handlers of dot_int8.

#include <vector>

#include "common/isa.h"
#include "ffi/call.h"
#include "ffi/dot_int8_call.h"

namespace jaxtap::ffi {
namespace {

void Warm(const DotInt8Config& config) {
  constexpr int64_t kSide = 64;
  const std::vector<int8_t> x(kSide * kSide, 1);
  const std::vector<float> scales(kSide, 1.0f);
  std::vector<float> out(x.size());
  training::Dot args;
  args.k = args.m = args.n = kSide;
  args.lhs_last = config.lhs_last;
  args.rhs_last = config.rhs_last;
  args.lhs = args.rhs = x.data();
  args.lhs_scales = args.rhs_scales = scales.data();
  args.out = out.data();
  training::dot_int8(args, Parallel(), selected_isa());
}

void Run(const DotInt8Call& given, const Parallel& parallel) {
  training::dot_int8(given.args, parallel, selected_isa());
}

const Handlers<DotInt8Call, Warm, Run> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
