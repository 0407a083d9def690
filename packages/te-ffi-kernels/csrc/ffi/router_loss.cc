// Handlers of the router's loss, with Transformer Engine's operands, attributes and results.

#include <vector>

#include "ffi/floats.h"
#include "ffi/registry.h"
#include "ffi/router_loss_call.h"
#include "ffi/stages.h"
#include "ffi/threads.h"
#include "router/router.h"

namespace jaxtap::ffi {
namespace {

constexpr char kLoss[] = "te_ffi_kernels.fused_moe_aux_loss_forward";
constexpr char kLossGradient[] = "te_ffi_kernels.fused_moe_aux_loss_backward";

struct Counts {};
struct Grads {};

// The arguments of a loss, without its coefficient.
router::Loss LossOf(const RouterLossShape& shape, const Array& probs) {
  router::Loss args;
  args.tokens = shape.tokens;
  args.experts = shape.experts;
  args.dtype = te::float_of(probs.dtype);
  return args;
}

void Loss(const RouterLossConfig& config, xffi::ThreadPool pool, const RouterLossCall& call) {
  const auto& [probs, tokens, aux_loss, const_buf] = call;
  const RouterLossShape shape = call.Check();
  router::Loss args = LossOf(shape, probs);
  args.coefficient = router::coefficient(args.tokens, args.experts, config.topk, config.coeff);
  const float* counts = ToFloats<Counts>(tokens);
  XlaScheduler scheduler(pool);
  const int64_t bytes = args.tokens * args.experts * static_cast<int64_t>(byte_size(probs.dtype));
  for (int64_t i = 0; i < shape.batch; ++i) {
    const float loss = router::loss(args, static_cast<const char*>(probs.data) + i * bytes,
                                    counts + i * args.experts, Parallel(scheduler));
    SetFloat(aux_loss, i, loss);
    static_cast<float*>(const_buf.data)[2 * i] = args.coefficient;
    static_cast<float*>(const_buf.data)[2 * i + 1] = loss;
  }
}

void LossGradient(xffi::ThreadPool pool, const RouterLossGradientCall& call) {
  const auto& [const_buf, tokens, grad, out] = call;
  const RouterLossShape shape = call.Check();
  router::Loss args = LossOf(shape, out);
  const float* counts = ToFloats<Counts>(tokens);
  const float* grads = ToFloats<Grads>(grad);
  XlaScheduler scheduler(pool);
  const int64_t bytes = args.tokens * args.experts * static_cast<int64_t>(byte_size(out.dtype));
  for (int64_t i = 0; i < shape.batch; ++i) {
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
                           RouterLossConfig config(attributes);
                           WarmLoss();
                         });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecuteLoss,
                       [](xffi::ThreadPool pool, In probs, In tokens, Out aux_loss, Out const_buf,
                          xffi::Dictionary attributes) {
                         return Guarded(kLoss, [&] {
                           Loss(RouterLossConfig(attributes), pool,
                                {Read("probs", probs), Read("tokens_per_expert", tokens),
                                 Read("aux_loss", aux_loss), Read("const_buf", const_buf)});
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
                           LossGradient(pool, {Read("const_buf", const_buf),
                                               Read("tokens_per_expert", tokens),
                                               Read("grad_aux_loss", grad),
                                               Read("grad_probs", out)});
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
