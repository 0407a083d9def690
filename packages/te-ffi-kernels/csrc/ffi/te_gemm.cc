// Handlers of gemm_v2 and of the deprecated gemm, with Transformer Engine's arguments, results and
// attributes.

#include <cstring>
#include <optional>
#include <vector>

#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_gemm_call.h"
#include "ffi/threads.h"
#include "te/table.h"

namespace jaxtap::ffi {
namespace {

using te::Scaling;

constexpr char kV2[] = "te_ffi_kernels.gemm_v2";
constexpr char kV1[] = "te_ffi_kernels.gemm";

void Warm(const GemmConfig& config) {
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

void Execute(const GemmConfig& config, xffi::ThreadPool pool, const GemmCall& given,
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
  XlaScheduler scheduler(pool);
  te::gemm(args, Parallel(scheduler));
  // The gradient passes on what it was given.
  if (args.gelu_input != nullptr && epilogue->pre_gelu_out.data != args.gelu_input) {
    void* passed_on = given.OfResult(epilogue->pre_gelu_out, args.m * args.n, "as the result");
    std::memcpy(passed_on, args.gelu_input,
                static_cast<size_t>(args.m * args.n) * byte_size(given.out.dtype));
  }
}

XLA_FFI_DEFINE_HANDLER(kV2Instantiate,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kV2, [&] { Warm(GemmConfig::V2(attributes)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kV2Execute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer lhs, xffi::AnyBuffer lhs_scale_inv,
       xffi::AnyBuffer rhs, xffi::AnyBuffer rhs_scale_inv, xffi::AnyBuffer bias,
       xffi::AnyBuffer alpha, xffi::AnyBuffer beta, xffi::Result<xffi::AnyBuffer> out,
       xffi::Result<xffi::AnyBuffer>, xffi::Dictionary attributes) {
      return Guarded(kV2, [&] {
        Execute(GemmConfig::V2(attributes), pool,
                {Read("lhs", lhs), Read("lhs_scale_inv", lhs_scale_inv), Read("rhs", rhs),
                 Read("rhs_scale_inv", rhs_scale_inv), Read("bias", bias), Read("alpha", alpha),
                 Read("beta", beta), Read("output", out)},
                {});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // lhs
        .Arg<xffi::AnyBuffer>()  // lhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // rhs
        .Arg<xffi::AnyBuffer>()  // rhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // bias
        .Arg<xffi::AnyBuffer>()  // alpha
        .Arg<xffi::AnyBuffer>()  // beta
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attrs());

const Registration kV2Registration({kV2, kV2Instantiate, kV2Execute});

XLA_FFI_DEFINE_HANDLER(kV1Instantiate,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kV1, [&] { Warm(GemmConfig::V1(attributes)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kV1Execute,
    [](xffi::ThreadPool pool, xffi::AnyBuffer lhs, xffi::AnyBuffer lhs_scale_inv,
       xffi::AnyBuffer rhs, xffi::AnyBuffer rhs_scale_inv, xffi::AnyBuffer bias,
       xffi::AnyBuffer gelu_input, xffi::AnyBuffer alpha, xffi::AnyBuffer beta,
       xffi::Result<xffi::AnyBuffer> out, xffi::Result<xffi::AnyBuffer> bias_grad,
       xffi::Result<xffi::AnyBuffer> pre_gelu_out, xffi::Result<xffi::AnyBuffer>,
       xffi::Dictionary attributes) {
      return Guarded(kV1, [&] {
        Execute(GemmConfig::V1(attributes), pool,
                {Read("lhs", lhs), Read("lhs_scale_inv", lhs_scale_inv), Read("rhs", rhs),
                 Read("rhs_scale_inv", rhs_scale_inv), Read("bias", bias), Read("alpha", alpha),
                 Read("beta", beta), Read("output", out)},
                Epilogue{Read("gelu_input", gelu_input), Read("bias_grad", bias_grad),
                         Read("pre_gelu_out", pre_gelu_out)});
      });
    },
    xffi::Ffi::Bind()
        .Ctx<xffi::ThreadPool>()
        .Arg<xffi::AnyBuffer>()  // lhs
        .Arg<xffi::AnyBuffer>()  // lhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // rhs
        .Arg<xffi::AnyBuffer>()  // rhs_scale_inv
        .Arg<xffi::AnyBuffer>()  // bias
        .Arg<xffi::AnyBuffer>()  // gelu_input
        .Arg<xffi::AnyBuffer>()  // alpha
        .Arg<xffi::AnyBuffer>()  // beta
        .Ret<xffi::AnyBuffer>()  // output
        .Ret<xffi::AnyBuffer>()  // bias_grad
        .Ret<xffi::AnyBuffer>()  // pre_gelu_out
        .Ret<xffi::AnyBuffer>()  // workspace, not used
        .Attrs());

const Registration kV1Registration({kV1, kV1Instantiate, kV1Execute});

}  // namespace
}  // namespace jaxtap::ffi
