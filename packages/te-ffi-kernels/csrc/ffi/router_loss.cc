// Handlers of the router's loss.

#include "ffi/call.h"
#include "ffi/floats.h"
#include "ffi/router_loss_call.h"
#include "router/router.h"

namespace jaxtap::ffi {
namespace {

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

void Loss(const RouterLossCall& given, const Parallel& parallel) {
  const RouterLossShape& shape = given.shape;
  router::Loss args = LossOf(shape, given.probs);
  args.coefficient = given.coefficient();
  const float* counts = ToFloats<Counts>(given.tokens_per_expert);
  float* const numbers = static_cast<float*>(given.const_buf.data);
  const int64_t bytes =
      args.tokens * args.experts * static_cast<int64_t>(byte_size(given.probs.dtype));
  for (int64_t i = 0; i < shape.batch; ++i) {
    const float loss = router::loss(args, static_cast<const char*>(given.probs.data) + i * bytes,
                                    counts + i * args.experts, parallel);
    SetFloat(given.aux_loss, i, loss);
    numbers[2 * i] = args.coefficient;
    numbers[2 * i + 1] = loss;
  }
}

void LossGradient(const RouterLossGradientCall& given, const Parallel& parallel) {
  const RouterLossShape& shape = given.shape;
  router::Loss args = LossOf(shape, given.out);
  const float* counts = ToFloats<Counts>(given.tokens_per_expert);
  const float* grads = ToFloats<Grads>(given.grad);
  const int64_t bytes =
      args.tokens * args.experts * static_cast<int64_t>(byte_size(given.out.dtype));
  for (int64_t i = 0; i < shape.batch; ++i) {
    args.coefficient = static_cast<const float*>(given.const_buf.data)[2 * i];
    router::loss_gradient(args, counts + i * args.experts, grads[i],
                          static_cast<char*>(given.out.data) + i * bytes, parallel);
  }
}

const Handlers<RouterLossCall, Loss> kLoss;
const Handlers<RouterLossGradientCall, LossGradient> kLossGradient;

}  // namespace
}  // namespace jaxtap::ffi
