// Handlers of the router: with Transformer Engine's operands, attributes and results, and its number
// 2 (sqrtsoftplus) of score functions beside.

#include <vector>

#include "ffi/floats.h"
#include "ffi/registry.h"
#include "ffi/router_call.h"
#include "ffi/stages.h"
#include "ffi/threads.h"
#include "router/router.h"

namespace jaxtap::ffi {
namespace {

using router::Options;

constexpr char kForward[] = "te_ffi_kernels.fused_topk_with_score_function_forward";
constexpr char kBackward[] = "te_ffi_kernels.fused_topk_with_score_function_backward";

// As many experts as the options ask for, for warm-ups.
void SomeExperts(Options& options) {
  constexpr int64_t kMost = 1 << 12;
  if (options.topk > kMost || options.groups > kMost) {  // more than a warm-up is worth
    options.topk = 8;
    options.groups = options.group_topk = 0;
  }
  const int64_t each =
      options.group_topk > 0 ? (options.topk / options.group_topk + 15) / 16 * 16 : 16;
  options.experts =
      options.group_topk > 0 ? each * options.groups : (options.topk + 15) / 16 * 16;
}

void WarmForward(Options options) {
  SomeExperts(options);
  const auto size = static_cast<size_t>(options.experts);
  std::vector<float> logits(size), probs(size), saved(size);
  std::vector<uint8_t> map(size);
  router::Forward args;
  args.options = options;
  args.tokens = 1;
  args.logits = logits.data();
  args.probs = probs.data();
  args.map = map.data();
  args.saved = saved.data();
  router::forward(args, Parallel());
}

struct Bias {};

void Forward(Options options, xffi::ThreadPool pool, const RouterForwardCall& call) {
  router::Forward args;
  args.tokens = call.Check(options);
  args.options = options;
  args.dtype = te::float_of(call.logits.dtype);
  args.logits = call.logits.data;
  if (call.has_bias(options)) args.bias = ToFloats<Bias>(call.bias);
  args.probs = call.probs.data;
  args.map = static_cast<uint8_t*>(call.map.data);
  args.saved = static_cast<float*>(call.saved.data);
  XlaScheduler scheduler(pool);
  router::forward(args, Parallel(scheduler));
}

void WarmBackward(Options options) {
  SomeExperts(options);
  const auto size = static_cast<size_t>(options.experts);
  std::vector<float> grad(size), saved(size), out(size);
  std::vector<uint8_t> map(size);
  router::Backward args;
  args.options = options;
  args.tokens = 1;
  args.map = map.data();
  args.saved = saved.data();
  args.grad = grad.data();
  args.out = out.data();
  router::backward(args, Parallel());
}

void Backward(Options options, xffi::ThreadPool pool, const RouterBackwardCall& call) {
  router::Backward args;
  args.tokens = call.Check(options);
  args.options = options;
  args.dtype = te::float_of(call.grad.dtype);
  args.map = static_cast<const uint8_t*>(call.map.data);
  args.saved = static_cast<const float*>(call.saved.data);
  args.grad = call.grad.data;
  args.out = call.out.data;
  XlaScheduler scheduler(pool);
  router::backward(args, Parallel(scheduler));
}

using In = xffi::AnyBuffer;
using Out = xffi::Result<xffi::AnyBuffer>;

XLA_FFI_DEFINE_HANDLER(kInstantiateForward,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kForward,
                                       [&] { WarmForward(RouterOptions(attributes, true)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecuteForward,
                       [](xffi::ThreadPool pool, In logits, In bias, Out probs, Out map, Out saved,
                          xffi::Dictionary attributes) {
                         return Guarded(kForward, [&] {
                           Forward(RouterOptions(attributes, true), pool,
                                   {Read("logits", logits), Read("expert_bias", bias),
                                    Read("probs", probs), Read("routing_map", map),
                                    Read("intermediate_output", saved)});
                         });
                       },
                       xffi::Ffi::Bind()
                           .Ctx<xffi::ThreadPool>()
                           .Arg<In>()  // logits
                           .Arg<In>()  // expert_bias
                           .Ret<In>()  // probs
                           .Ret<In>()  // routing_map
                           .Ret<In>()  // intermediate_output
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(kInstantiateBackward,
                       [](xffi::Dictionary attributes) {
                         return Warmed(kBackward,
                                       [&] { WarmBackward(RouterOptions(attributes, false)); });
                       },
                       xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(kExecuteBackward,
                       [](xffi::ThreadPool pool, In map, In saved, In grad, Out out,
                          xffi::Dictionary attributes) {
                         return Guarded(kBackward, [&] {
                           Backward(RouterOptions(attributes, false), pool,
                                    {Read("routing_map", map), Read("intermediate_output", saved),
                                     Read("grad_probs", grad), Read("grad_logits", out)});
                         });
                       },
                       xffi::Ffi::Bind()
                           .Ctx<xffi::ThreadPool>()
                           .Arg<In>()  // routing_map
                           .Arg<In>()  // intermediate_output
                           .Arg<In>()  // grad_probs
                           .Ret<In>()  // grad_logits
                           .Attrs());

const Registration kForwardRegistration({kForward, kInstantiateForward, kExecuteForward});
const Registration kBackwardRegistration({kBackward, kInstantiateBackward, kExecuteBackward});

}  // namespace
}  // namespace jaxtap::ffi
