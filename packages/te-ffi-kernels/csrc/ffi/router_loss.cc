// Handlers of the router's loss, with Transformer Engine's operands, attributes and results.

#include <vector>

#include "ffi/call.h"
#include "ffi/floats.h"
#include "ffi/router_loss_call.h"
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

void Loss(const Call& call) {
  call.NeedCounts(2, 2);
  const RouterLossConfig config(call.attributes);
  const RouterLossCall given = {call.Operand(0, "probs"), call.Operand(1, "tokens_per_expert"),
                                call.Result(0, "aux_loss"), call.Result(1, "const_buf")};
  const auto& [probs, tokens, aux_loss, const_buf] = given;
  const RouterLossShape shape = given.Check();
  router::Loss args = LossOf(shape, probs);
  args.coefficient = router::coefficient(args.tokens, args.experts, config.topk, config.coeff);
  const float* counts = ToFloats<Counts>(tokens);
  XlaScheduler scheduler(call);
  const int64_t bytes = args.tokens * args.experts * static_cast<int64_t>(byte_size(probs.dtype));
  for (int64_t i = 0; i < shape.batch; ++i) {
    const float loss = router::loss(args, static_cast<const char*>(probs.data) + i * bytes,
                                    counts + i * args.experts, Parallel(scheduler));
    SetFloat(aux_loss, i, loss);
    static_cast<float*>(const_buf.data)[2 * i] = args.coefficient;
    static_cast<float*>(const_buf.data)[2 * i + 1] = loss;
  }
}

void LossGradient(const Call& call) {
  call.NeedCounts(3, 1);
  const RouterLossGradientCall given = {
      call.Operand(0, "const_buf"), call.Operand(1, "tokens_per_expert"),
      call.Operand(2, "grad_aux_loss"), call.Result(0, "grad_probs")};
  const auto& [const_buf, tokens, grad, out] = given;
  const RouterLossShape shape = given.Check();
  router::Loss args = LossOf(shape, out);
  const float* counts = ToFloats<Counts>(tokens);
  const float* grads = ToFloats<Grads>(grad);
  XlaScheduler scheduler(call);
  const int64_t bytes = args.tokens * args.experts * static_cast<int64_t>(byte_size(out.dtype));
  for (int64_t i = 0; i < shape.batch; ++i) {
    args.coefficient = static_cast<const float*>(const_buf.data)[2 * i];
    router::loss_gradient(args, counts + i * args.experts, grads[i],
                          static_cast<char*>(out.data) + i * bytes, Parallel(scheduler));
  }
}

void WarmBoth() {
  constexpr int64_t kSide = 32;
  const std::vector<float> probs(kSide * kSide, 0.5f);
  std::vector<float> out(probs.size());
  router::Loss args;
  args.tokens = args.experts = kSide;
  args.coefficient = 1.0f;
  router::loss(args, probs.data(), probs.data(), Parallel());
  router::loss_gradient(args, probs.data(), 1.0f, out.data(), Parallel());
}

void WarmLoss(const Attributes& attributes) {
  RouterLossConfig config(attributes);
  WarmBoth();
}

void WarmLossGradient(const Attributes&) { WarmBoth(); }

const Handlers<kLoss, WarmLoss, Loss> kOne;
const Handlers<kLossGradient, WarmLossGradient, LossGradient> kTwo;

}  // namespace
}  // namespace jaxtap::ffi
