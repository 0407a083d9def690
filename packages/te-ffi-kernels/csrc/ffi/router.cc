// Handlers of the router: with Transformer Engine's operands, attributes and results, and its number
// 2 (sqrtsoftplus) of score functions beside.

#include <vector>

#include "ffi/call.h"
#include "ffi/floats.h"
#include "ffi/router_call.h"
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

void WarmForward(const Attributes& attributes) {
  Options options = RouterOptions(attributes, true);
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

void Forward(const Call& call) {
  call.NeedCounts(2, 3);
  Options options = RouterOptions(call.attributes, true);
  const RouterForwardCall given = {call.Operand(0, "logits"), call.Operand(1, "expert_bias"),
                                   call.Result(0, "probs"), call.Result(1, "routing_map"),
                                   call.Result(2, "intermediate_output")};
  router::Forward args;
  args.tokens = given.Check(options);
  args.options = options;
  args.dtype = te::float_of(given.logits.dtype);
  args.logits = given.logits.data;
  if (given.has_bias(options)) args.bias = ToFloats<Bias>(given.bias);
  args.probs = given.probs.data;
  args.map = static_cast<uint8_t*>(given.map.data);
  args.saved = static_cast<float*>(given.saved.data);
  XlaScheduler scheduler(call);
  router::forward(args, Parallel(scheduler));
}

void WarmBackward(const Attributes& attributes) {
  Options options = RouterOptions(attributes, false);
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

void Backward(const Call& call) {
  call.NeedCounts(3, 1);
  Options options = RouterOptions(call.attributes, false);
  const RouterBackwardCall given = {
      call.Operand(0, "routing_map"), call.Operand(1, "intermediate_output"),
      call.Operand(2, "grad_probs"), call.Result(0, "grad_logits")};
  router::Backward args;
  args.tokens = given.Check(options);
  args.options = options;
  args.dtype = te::float_of(given.grad.dtype);
  args.map = static_cast<const uint8_t*>(given.map.data);
  args.saved = static_cast<const float*>(given.saved.data);
  args.grad = given.grad.data;
  args.out = given.out.data;
  XlaScheduler scheduler(call);
  router::backward(args, Parallel(scheduler));
}

const Handlers<kForward, WarmForward, Forward> kOne;
const Handlers<kBackward, WarmBackward, Backward> kTwo;

}  // namespace
}  // namespace jaxtap::ffi
