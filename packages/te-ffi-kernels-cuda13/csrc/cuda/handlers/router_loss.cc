// Handlers of the router's loss. The forward pass may be given a workspace beside Transformer
// Engine's results: with it more than one block adds up.

#include "cuda/kernels/router.h"

#include "cuda/handlers/handler.h"
#include "ffi/router_loss_call.h"

namespace jaxtap::cuda {
namespace {

constexpr char kLoss[] = "te_ffi_kernels.fused_moe_aux_loss_forward";
constexpr char kLossGradient[] = "te_ffi_kernels.fused_moe_aux_loss_backward";

RouterLoss LossOf(const ffi::RouterLossShape& shape, DType dtype, const Array& tokens_per_expert,
                  const Array& const_buf) {
  RouterLoss args;
  args.batch = shape.batch;
  args.tokens = shape.tokens;
  args.experts = shape.experts;
  args.dtype = te::float_of(dtype);
  args.counts = tokens_per_expert.data;
  args.counts_dtype = tokens_per_expert.dtype;
  args.numbers = static_cast<float*>(const_buf.data);
  return args;
}

void Check(const xffi::Dictionary& attributes) { ffi::RouterLossConfig{attributes}; }

void Loss(const Call& call) {
  const bool has_workspace = call.results.size() == 3;
  call.NeedCounts(2, has_workspace ? 3 : 2);
  const ffi::RouterLossConfig config(call.attributes);
  const ffi::RouterLossCall given = {call.Operand(0, "probs"), call.Operand(1, "tokens_per_expert"),
                                     call.Result(0, "aux_loss"), call.Result(1, "const_buf")};
  const ffi::RouterLossShape shape = given.Check();
  const RouterLoss args =
      LossOf(shape, given.probs.dtype, given.tokens_per_expert, given.const_buf);
  double* parts = nullptr;
  if (has_workspace) {
    const Array workspace = call.Result(2, "workspace");
    const int64_t bytes = shape.batch * loss_parts(args) * static_cast<int64_t>(sizeof(double));
    NeedSize(workspace.NeedDtype({DType::U8}), bytes, "those of parts of the sums");
    parts = static_cast<double*>(workspace.data);
  }
  const float coefficient =
      router::coefficient(shape.tokens, shape.experts, config.topk, config.coeff);
  router_loss(args, coefficient, given.probs.data, parts, given.aux_loss.data, call.stream);
}

void CheckGradient(const xffi::Dictionary&) {}

void LossGradient(const Call& call) {
  call.NeedCounts(3, 1);
  const ffi::RouterLossGradientCall given = {
      call.Operand(0, "const_buf"), call.Operand(1, "tokens_per_expert"),
      call.Operand(2, "grad_aux_loss"), call.Result(0, "grad_probs")};
  const RouterLoss args =
      LossOf(given.Check(), given.out.dtype, given.tokens_per_expert, given.const_buf);
  router_loss_gradient(args, given.grad.data, given.out.data, call.stream);
}

const Handlers<kLoss, Check, Loss> kOne;
const Handlers<kLossGradient, CheckGradient, LossGradient> kTwo;

}  // namespace
}  // namespace jaxtap::cuda
