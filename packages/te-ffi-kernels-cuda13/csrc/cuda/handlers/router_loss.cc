// Handlers of the router's loss. The forward pass may be given a workspace beside Transformer
// Engine's results: with it more than one block adds up.

#include "cuda/kernels/router.h"

#include "cuda/handlers/handler.h"
#include "ffi/router_loss_call.h"

namespace jaxtap::cuda {
namespace {

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

void Loss(const ffi::RouterLossCall& given, const Call& call) {
  const RouterLoss args =
      LossOf(given.shape, given.probs.dtype, given.tokens_per_expert, given.const_buf);
  double* parts = nullptr;
  if (call.results.size() == 3) {
    const Array workspace = call.Memory();
    const int64_t bytes =
        given.shape.batch * loss_parts(args) * static_cast<int64_t>(sizeof(double));
    NeedSize(workspace, bytes, "those of parts of the sums");
    parts = static_cast<double*>(workspace.data);
  }
  router_loss(args, given.coefficient(), given.probs.data, parts, given.aux_loss.data,
              call.stream);
}

void LossGradient(const ffi::RouterLossGradientCall& given, const Call& call) {
  const RouterLoss args =
      LossOf(given.shape, given.out.dtype, given.tokens_per_expert, given.const_buf);
  router_loss_gradient(args, given.grad.data, given.out.data, call.stream);
}

const Handlers<ffi::RouterLossCall, Loss, Workspace::kMaybe> kLoss;
const Handlers<ffi::RouterLossGradientCall, LossGradient> kLossGradient;

}  // namespace
}  // namespace jaxtap::cuda
