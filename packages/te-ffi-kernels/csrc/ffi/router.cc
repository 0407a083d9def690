// Handlers of the router.

#include <vector>

#include "ffi/call.h"
#include "ffi/floats.h"
#include "ffi/router_call.h"
#include "router/router.h"

namespace jaxtap::ffi {
namespace {

using router::Options;

// As many experts as the options ask for, for warm-ups.
Options SomeExperts(Options options) {
  constexpr int64_t kMost = 1 << 12;
  if (options.topk > kMost || options.groups > kMost) {  // more than a warm-up is worth
    options.topk = 8;
    options.groups = options.group_topk = 0;
  }
  const int64_t each =
      options.group_topk > 0 ? (options.topk / options.group_topk + 15) / 16 * 16 : 16;
  options.experts =
      options.group_topk > 0 ? each * options.groups : (options.topk + 15) / 16 * 16;
  return options;
}

void WarmForward(const RouterConfig<true>& config) {
  const Options options = SomeExperts(config.options);
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

void Forward(const RouterForwardCall& given, const Parallel& parallel) {
  router::Forward args;
  given.Set(args);
  if (given.has_bias()) args.bias = ToFloats<Bias>(given.bias);
  router::forward(args, parallel);
}

void WarmBackward(const RouterConfig<false>& config) {
  const Options options = SomeExperts(config.options);
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

void Backward(const RouterBackwardCall& given, const Parallel& parallel) {
  router::backward(given.args, parallel);
}

const Handlers<RouterForwardCall, WarmForward, Forward> kForward;
const Handlers<RouterBackwardCall, WarmBackward, Backward> kBackward;

}  // namespace
}  // namespace jaxtap::ffi
