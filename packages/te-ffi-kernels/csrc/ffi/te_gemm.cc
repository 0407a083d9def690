// Handlers of gemm_v2, with Transformer Engine's arguments, results and attributes.

#include <vector>

#include "ffi/call.h"
#include "ffi/te_gemm_call.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

constexpr char kTarget[] = "te_ffi_kernels.gemm_v2";

void Warm(const Attributes& attributes) {
  const auto config = GemmConfig::V2(attributes);
  constexpr int64_t kSide = te::kTile;
  std::vector<float> numbers(kSide * kSide, 1.0f), out(kSide * kSide), scales(kSide, 1.0f);
  te::Gemm args;
  args.m = args.n = args.k = kSide;
  const bool codes = config.scaling != Scaling::kNone;
  for (te::Factor* factor : {&args.lhs, &args.rhs}) {
    factor->data = numbers.data();
    factor->dtype = codes ? DType::F8E4M3FN : DType::F32;
    factor->scales = codes ? scales.data() : nullptr;
  }
  args.scaling = config.scaling;
  args.lhs.lanes_first = !config.lhs_transposed;
  args.rhs.lanes_first = config.rhs_transposed;
  args.out = out.data();
  args.gelu = config.gelu;
  te::gemm(args, Parallel());
}

float Number(const Array& array) { return *static_cast<const float*>(array.data); }

void Multiply(const Call& call) {
  call.NeedCounts(7, 2);  // the last result is a workspace, which isn't used
  const GemmCall given{call.Operand(0, "lhs"),  call.Operand(1, "lhs_scale_inv"),
                       call.Operand(2, "rhs"),  call.Operand(3, "rhs_scale_inv"),
                       call.Operand(4, "bias"), call.Operand(5, "alpha"),
                       call.Operand(6, "beta"), call.Result(0, "output")};
  te::Gemm args = given.Check(GemmConfig::V2(call.attributes));
  const float beta = Number(given.beta);
  if (beta != 0.0f) {
    throw invalid_argument("beta is ", beta, ", and must be 0: the result has no value before");
  }
  args.alpha = Number(given.alpha);
  XlaScheduler scheduler(call);
  te::gemm(args, Parallel(scheduler));
}

const Handlers<kTarget, Warm, Multiply> kGemm;

}  // namespace
}  // namespace jaxtap::ffi
