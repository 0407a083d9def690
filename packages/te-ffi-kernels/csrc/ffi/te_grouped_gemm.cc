// Handlers of grouped_gemm_v2.

#include "ffi/call.h"
#include "ffi/te_grouped_gemm_call.h"

namespace jaxtap::ffi {
namespace {

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

const Handlers<GroupedGemmCall, Multiply> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
