// Handlers of grouped_gemm_v2.

#include <vector>

#include "ffi/call.h"
#include "ffi/te_grouped_gemm_call.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

void Warm(const GroupedGemmConfig& config) {
  constexpr int64_t kSide = te::kTile;
  const std::vector<float> numbers(kSide * kSide, 1.0f), scales(kSide, 1.0f);
  std::vector<float> out(kSide * kSide);
  te::Gemm args;
  args.m = args.n = args.k = kSide;
  args.scaling = config.scaling;
  const bool quantized = config.scaling != te::Scaling::kNone;
  for (te::Factor* factor : {&args.lhs, &args.rhs}) {
    factor->data = numbers.data();
    factor->dtype = quantized ? DType::F8E4M3FN : DType::F32;
    factor->scales = quantized ? scales.data() : nullptr;
  }
  args.lhs.k_is_last = !config.lhs_transposed;
  args.rhs.k_is_last = config.rhs_transposed;
  args.out = out.data();
  te::gemm(args, Parallel());
}

void Multiply(const GroupedGemmCall& given, const Parallel& parallel) {
  const auto* beta = static_cast<const float*>(given.beta.data);
  for (int64_t i = 0; i < given.args.groups; ++i) {
    if (beta[i] != 0.0f) {
      throw invalid_argument("beta[", i, "] must be 0, got ", beta[i], ". The result has no value "
                             "before.");
    }
  }
  te::grouped_gemm(given.args, static_cast<const int32_t*>(given.group_sizes.data),
                   static_cast<const float*>(given.alpha.data), parallel);
}

const Handlers<GroupedGemmCall, Warm, Multiply> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
