// Handlers of gemm_v2 and of the deprecated gemm, with Transformer Engine's arguments, results and
// attributes.

#include <cstring>
#include <optional>
#include <vector>

#include "ffi/call.h"
#include "ffi/te_gemm_call.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

constexpr char kV2[] = "te_ffi_kernels.gemm_v2";
constexpr char kV1[] = "te_ffi_kernels.gemm";

void WarmProduct(const GemmConfig& config) {
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
  args.gelu = config.gelu && !config.grad;
  te::gemm(args, Parallel());
}

float Number(const Array& array) { return *static_cast<const float*>(array.data); }

// What the deprecated gemm has besides.
struct Epilogue {
  Array gelu_input, bias_grad, pre_gelu_out;
};

void Multiply(const GemmConfig& config, const Call& call, const GemmCall& given,
              const std::optional<Epilogue>& epilogue) {
  te::Gemm args = given.Check(config);
  const float beta = Number(given.beta);
  if (beta != 0.0f) {
    throw invalid_argument("beta is ", beta, ", and must be 0: the result has no value before");
  }
  args.alpha = Number(given.alpha);
  if (epilogue.has_value()) {
    const auto& [gelu_input, bias_grad, pre_gelu_out] = *epilogue;
    if (config.gelu && config.grad) {
      args.gelu_input = given.OfResult(gelu_input, args.m * args.n, "as the result");
    } else if (config.gelu) {
      args.before_gelu = given.OfResult(pre_gelu_out, args.m * args.n, "as the result");
    }
    if (config.bias && config.grad) {
      args.bias_grad = given.OfResult(bias_grad, args.n, "one for each column of the result");
    } else {
      Clear({bias_grad});
    }
  }
  XlaScheduler scheduler(call);
  te::gemm(args, Parallel(scheduler));
  // The gradient passes on what it was given.
  if (args.gelu_input != nullptr && epilogue->pre_gelu_out.data != args.gelu_input) {
    void* passed_on = given.OfResult(epilogue->pre_gelu_out, args.m * args.n, "as the result");
    std::memcpy(passed_on, args.gelu_input,
                static_cast<size_t>(args.m * args.n) * byte_size(given.out.dtype));
  }
}

GemmCall Given(const Call& call, int64_t alpha) {
  return {call.Operand(0, "lhs"),         call.Operand(1, "lhs_scale_inv"),
          call.Operand(2, "rhs"),         call.Operand(3, "rhs_scale_inv"),
          call.Operand(4, "bias"),        call.Operand(alpha, "alpha"),
          call.Operand(alpha + 1, "beta"), call.Result(0, "output")};
}

void WarmV2(const Attributes& attributes) { WarmProduct(GemmConfig::V2(attributes)); }

void V2(const Call& call) {
  call.NeedCounts(7, 2);  // the last result is a workspace, which isn't used
  Multiply(GemmConfig::V2(call.attributes), call, Given(call, 5), {});
}

void WarmV1(const Attributes& attributes) { WarmProduct(GemmConfig::V1(attributes)); }

void V1(const Call& call) {
  call.NeedCounts(8, 4);  // the last result is a workspace, which isn't used
  Multiply(GemmConfig::V1(call.attributes), call, Given(call, 6),
           Epilogue{call.Operand(5, "gelu_input"), call.Result(1, "bias_grad"),
                    call.Result(2, "pre_gelu_out")});
}

const Handlers<kV2, WarmV2, V2> kOne;
const Handlers<kV1, WarmV1, V1> kTwo;

}  // namespace
}  // namespace jaxtap::ffi
