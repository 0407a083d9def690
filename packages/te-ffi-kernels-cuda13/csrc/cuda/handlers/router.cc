// Handlers of the router.

#include "cuda/kernels/router.h"

#include "cuda/handlers/handler.h"
#include "ffi/router_call.h"

namespace jaxtap::cuda {
namespace {

constexpr char kForward[] = "te_ffi_kernels.fused_topk_with_score_function_forward";
constexpr char kBackward[] = "te_ffi_kernels.fused_topk_with_score_function_backward";

template <bool kIsForward>
void Check(const xffi::Dictionary& attributes) {
  ffi::RouterOptions(attributes, kIsForward);
}

void Forward(const Call& call) {
  call.NeedCounts(2, 3);
  const ffi::RouterForwardCall given = {
      call.Operand(0, "logits"), call.Operand(1, "expert_bias"), call.Result(0, "probs"),
      call.Result(1, "routing_map"), call.Result(2, "intermediate_output")};
  RouterForward args;
  args.options = ffi::RouterOptions(call.attributes, true);
  args.tokens = given.Check(args.options);
  args.dtype = te::float_of(given.logits.dtype);
  args.logits = given.logits.data;
  if (given.has_bias(args.options)) {
    args.bias = given.bias.data;
    args.bias_dtype = te::float_of(given.bias.dtype);
  }
  args.probs = given.probs.data;
  args.map = static_cast<uint8_t*>(given.map.data);
  args.saved = static_cast<float*>(given.saved.data);
  router_forward(args, call.stream);
}

void Backward(const Call& call) {
  call.NeedCounts(3, 1);
  const ffi::RouterBackwardCall given = {
      call.Operand(0, "routing_map"), call.Operand(1, "intermediate_output"),
      call.Operand(2, "grad_probs"), call.Result(0, "grad_logits")};
  RouterBackward args;
  args.options = ffi::RouterOptions(call.attributes, false);
  args.tokens = given.Check(args.options);
  args.dtype = te::float_of(given.grad.dtype);
  args.map = static_cast<const uint8_t*>(given.map.data);
  args.saved = static_cast<const float*>(given.saved.data);
  args.grad = given.grad.data;
  args.out = given.out.data;
  router_backward(args, call.stream);
}

const Handlers<kForward, Check<true>, Forward> kOne;
const Handlers<kBackward, Check<false>, Backward> kTwo;

}  // namespace
}  // namespace jaxtap::cuda
