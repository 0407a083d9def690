// Handlers of the six softmax targets.

#include "cuda/kernels/softmax.h"

#include "cuda/handlers/handler.h"
#include "ffi/softmax_call.h"

namespace jaxtap::cuda {
namespace {

using Kind = ffi::SoftmaxKind;

constexpr char kScaledForward[] = "te_ffi_kernels.scaled_softmax_forward";
constexpr char kScaledBackward[] = "te_ffi_kernels.scaled_softmax_backward";
constexpr char kMaskedForward[] = "te_ffi_kernels.scaled_masked_softmax_forward";
constexpr char kMaskedBackward[] = "te_ffi_kernels.scaled_masked_softmax_backward";
constexpr char kCausalForward[] = "te_ffi_kernels.scaled_upper_triang_masked_softmax_forward";
constexpr char kCausalBackward[] = "te_ffi_kernels.scaled_upper_triang_masked_softmax_backward";

template <Kind kKind>
void Check(const xffi::Dictionary& attributes) {
  ffi::SoftmaxConfig{kKind, attributes};
}

template <Kind kKind>
void Forward(const Call& call) {
  constexpr bool kMasked = kKind == Kind::kMasked;
  call.NeedCounts(kMasked ? 2 : 1, 1);
  const ffi::SoftmaxConfig config(kKind, call.attributes);
  const Array x = call.Operand(0, "input"), out = call.Result(0, "output");
  SoftmaxForward args;
  args.shape = ffi::SoftmaxShapeOf<SoftmaxShape>(x, kKind);
  ffi::NeedAlike(out, x);
  args.scale = config.scale;
  args.x = x.data;
  args.out = out.data;
  if constexpr (kMasked) {
    const Array mask = call.Operand(1, "mask");
    args.masks = ffi::CheckMask(mask, args.shape);
    args.mask = static_cast<const uint8_t*>(mask.data);
  }
  if (x.size() != 0) softmax_forward(args, call.stream);
}

template <Kind kKind>
void Backward(const Call& call) {
  call.NeedCounts(2, 1);
  const ffi::SoftmaxConfig config(kKind, call.attributes);
  const Array grad = call.Operand(0, "grad_output"), softmax = call.Operand(1, "softmax_output");
  const Array out = call.Result(0, "dgrad");
  SoftmaxBackward args;
  // Where it's masked, the result is zero and its gradient with it: there is no mask.
  args.shape =
      ffi::SoftmaxShapeOf<SoftmaxShape>(grad, kKind == Kind::kMasked ? Kind::kScaled : kKind);
  ffi::NeedAlike(softmax, grad);
  ffi::NeedAlike(out, grad);
  args.scale = config.scale;
  args.grad = grad.data;
  args.softmax = softmax.data;
  args.out = out.data;
  if (grad.size() != 0) softmax_backward(args, call.stream);
}

const Handlers<kScaledForward, Check<Kind::kScaled>, Forward<Kind::kScaled>> kOne;
const Handlers<kScaledBackward, Check<Kind::kScaled>, Backward<Kind::kScaled>> kTwo;
const Handlers<kMaskedForward, Check<Kind::kMasked>, Forward<Kind::kMasked>> kThree;
const Handlers<kMaskedBackward, Check<Kind::kMasked>, Backward<Kind::kMasked>> kFour;
const Handlers<kCausalForward, Check<Kind::kCausal>, Forward<Kind::kCausal>> kFive;
const Handlers<kCausalBackward, Check<Kind::kCausal>, Backward<Kind::kCausal>> kSix;

}  // namespace
}  // namespace jaxtap::cuda
