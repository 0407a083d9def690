// Handlers of the router's loss, with Transformer Engine's operands, attributes and results. There
// may be more axes before those of probs: a loss for each.

#include <vector>

#include "ffi/attributes.h"
#include "ffi/buffers.h"
#include "ffi/floats.h"
#include "ffi/registry.h"
#include "ffi/stages.h"
#include "ffi/te_arguments.h"
#include "ffi/threads.h"
#include "router/router.h"

namespace jaxtap::ffi {
namespace {

constexpr char kLoss[] = "te_ffi_kernels.fused_moe_aux_loss_forward";
constexpr char kLossGradient[] = "te_ffi_kernels.fused_moe_aux_loss_backward";

struct Counts {};
struct Grads {};

struct LossConfig {
  explicit LossConfig(const xffi::Dictionary& attributes)
      : topk(NeedAttribute<int64_t>(attributes, "topk")),
        coeff(NeedAttribute<double>(attributes, "coeff")) {
    if (topk < 1) throw invalid_argument("topk is ", topk, ", and must be positive");
  }

  int64_t topk;
  double coeff;
};

const float* TokensPerExpert(const Array& array, int64_t batch, int64_t experts) {
  array.NeedDtype({DType::S32, DType::S64, DType::S16, DType::F32, DType::BF16});
  NeedSize(array, batch * experts, "one for each expert");
  return ToFloats<Counts>(array);
}

// [..., tokens, experts]; each of the axes before has a loss of its own.
int64_t ShapeOf(const Array& probs, router::Loss& args) {
  const int64_t rank = probs.rank();
  if (rank < 2) {
    throw invalid_argument(probs.name, " is ", probs.Text(), ", and must be [tokens, experts]");
  }
  args.tokens = probs.shape[rank - 2];
  args.experts = probs.shape[rank - 1];
  args.dtype = te::float_of(NeedFloat(probs).dtype);
  return probs.Product(0, rank - 2);
}

void Loss(const LossConfig& config, xffi::ThreadPool pool, const Array& probs, const Array& tokens,
          const Array& aux_loss, const Array& const_buf) {
  router::Loss args;
  const int64_t batch = ShapeOf(probs, args);
  args.coefficient = router::coefficient(args.tokens, args.experts, config.topk, config.coeff);
  const float* counts = TokensPerExpert(tokens, batch, args.experts);
  NeedSize(aux_loss.NeedDtype({probs.dtype}), batch, "the loss");
  NeedSize(const_buf.NeedDtype({DType::F32}), 2 * batch, "the coefficient, and the loss");
  XlaScheduler scheduler(pool);
  const int64_t bytes = args.tokens * args.experts * static_cast<int64_t>(byte_size(probs.dtype));
  for (int64_t i = 0; i < batch; ++i) {
    const float loss = router::loss(args, static_cast<const char*>(probs.data) + i * bytes,
                                    counts + i * args.experts, Parallel(scheduler));
    SetFloat(aux_loss, i, loss);
    static_cast<float*>(const_buf.data)[2 * i] = args.coefficient;
    static_cast<float*>(const_buf.data)[2 * i + 1] = loss;
  }
}

void LossGradient(xffi::ThreadPool pool, const Array& const_buf, const Array& tokens,
                  const Array& grad, const Array& out) {
  router::Loss args;
  const int64_t batch = ShapeOf(out, args);
  const float* counts = TokensPerExpert(tokens, batch, args.experts);
  NeedSize(const_buf.NeedDtype({DType::F32}), 2 * batch, "the coefficient, and the loss");
  NeedSize(grad.NeedDtype({out.dtype}), batch, "the gradient of the loss");
  XlaScheduler scheduler(pool);
  const float* grads = ToFloats<Grads>(grad);
  const int64_t bytes = args.tokens * args.experts * static_cast<int64_t>(byte_size(out.dtype));
  for (int64_t i = 0; i < batch; ++i) {
    args.coefficient = static_cast<const float*>(const_buf.data)[2 * i];
    router::loss_gradient(args, counts + i * args.experts, grads[i],
                          static_cast<char*>(out.data) + i * bytes, Parallel(scheduler));
  }
}

void WarmLoss() {
  constexpr int64_t kSide = 32;
  const std::vector<float> probs(kSide * kSide, 0.5f);
  std::vector<float> out(probs.size());
  router::Loss args;
  args.tokens = args.experts = kSide;
  args.coefficient = 1.0f;
  router::loss(args, probs.data(), probs.data(), Parallel());
  router::loss_gradient(args, probs.data(), 1.0f, out.data(), Parallel());
}

using In = xffi::AnyBuffer;
using Out = xffi::Result<xffi::AnyBuffer>;

XLA_FFI_DEFINE_HANDLER(kInstantiateLoss,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kLoss, [&] {
                           LossConfig config(attributes);
                           WarmLoss();
                         });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecuteLoss,
                       [](xffi::ThreadPool pool, In probs, In tokens, Out aux_loss, Out const_buf,
                          xffi::Dictionary attributes) {
                         return Guarded(kLoss, [&] {
                           Loss(LossConfig(attributes), pool, Read("probs", probs),
                                Read("tokens_per_expert", tokens), Read("aux_loss", aux_loss),
                                Read("const_buf", const_buf));
                         });
                       },
                       xffi::Ffi::Bind()
                           .Ctx<xffi::ThreadPool>()
                           .Arg<In>()  // probs
                           .Arg<In>()  // tokens_per_expert
                           .Ret<In>()  // aux_loss
                           .Ret<In>()  // const_buf
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(kInstantiateLossGradient,
                       [](xffi::Dictionary) {
                         return Warmed(kLossGradient, [] { WarmLoss(); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecuteLossGradient,
                       [](xffi::ThreadPool pool, In const_buf, In tokens, In grad, Out out,
                          xffi::Dictionary) {
                         return Guarded(kLossGradient, [&] {
                           LossGradient(pool, Read("const_buf", const_buf),
                                        Read("tokens_per_expert", tokens),
                                        Read("grad_aux_loss", grad), Read("grad_probs", out));
                         });
                       },
                       xffi::Ffi::Bind()
                           .Ctx<xffi::ThreadPool>()
                           .Arg<In>()  // const_buf
                           .Arg<In>()  // tokens_per_expert
                           .Arg<In>()  // grad_aux_loss
                           .Ret<In>()  // grad_probs
                           .Attrs());

const Registration kLossRegistration({kLoss, kInstantiateLoss, kExecuteLoss});
const Registration kLossGradientRegistration(
    {kLossGradient, kInstantiateLossGradient, kExecuteLossGradient});

}  // namespace
}  // namespace jaxtap::ffi
