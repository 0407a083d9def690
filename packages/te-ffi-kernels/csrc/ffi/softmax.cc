// Handlers of the six softmax targets, with Transformer Engine's operands and attribute.

#include <vector>

#include "ffi/call.h"
#include "ffi/softmax_call.h"
#include "softmax/softmax.h"

namespace jaxtap::ffi {
namespace {

using Kind = SoftmaxKind;
using Config = SoftmaxConfig;

template <Kind kKind>
void WarmForward(const Attributes& attributes) {
  const Config config(kKind, attributes);
  constexpr int64_t kSide = 64;
  std::vector<float> x(kSide * kSide), out(x.size());
  std::vector<uint8_t> mask(x.size());
  softmax::Forward args;
  args.shape = {1, 1, kSide, kSide, te::Float::kF32, config.kind == Kind::kCausal};
  args.scale = config.scale;
  args.x = x.data();
  args.mask = config.kind == Kind::kMasked ? mask.data() : nullptr;
  args.out = out.data();
  softmax::forward(args, Parallel());
}

template <Kind kKind>
void Forward(const Call& call) {
  constexpr bool kHasMask = kKind == Kind::kMasked;
  call.NeedCounts(kHasMask ? 2 : 1, 1);
  const Config config(kKind, call.attributes);
  const Array x = call.Operand(0, "input"), out = call.Result(0, "output");
  softmax::Forward args;
  args.shape = SoftmaxShapeOf<softmax::Shape>(x, config.kind);
  args.scale = config.scale;
  args.x = x.data;
  NeedAlike(out, x);
  args.out = out.data;
  if (kHasMask) {
    const Array mask = call.Operand(1, "mask");
    args.masks = CheckMask(mask, args.shape);
    args.mask = static_cast<const uint8_t*>(mask.data);
  }
  if (x.size() == 0) return;
  XlaScheduler scheduler(call);
  softmax::forward(args, Parallel(scheduler));
}

template <Kind kKind>
void WarmBackward(const Attributes& attributes) {
  const Config config(kKind, attributes);
  constexpr int64_t kSide = 64;
  std::vector<float> numbers(kSide * kSide), out(numbers.size());
  softmax::Backward args;
  args.shape = {1, 1, kSide, kSide, te::Float::kF32, config.kind == Kind::kCausal};
  args.scale = config.scale;
  args.grad = args.softmax = numbers.data();
  args.out = out.data();
  softmax::backward(args, Parallel());
}

template <Kind kKind>
void Backward(const Call& call) {
  call.NeedCounts(2, 1);
  const Config config(kKind, call.attributes);
  const Array grad = call.Operand(0, "grad_output");
  const Array softmax_output = call.Operand(1, "softmax_output"), out = call.Result(0, "dgrad");
  softmax::Backward args;
  // Where it's masked, the result is zero and its gradient with it: there is no mask.
  args.shape = SoftmaxShapeOf<softmax::Shape>(
      grad, config.kind == Kind::kMasked ? Kind::kScaled : config.kind);
  args.scale = config.scale;
  args.grad = grad.data;
  NeedAlike(softmax_output, grad);
  args.softmax = softmax_output.data;
  NeedAlike(out, grad);
  args.out = out.data;
  if (grad.size() == 0) return;
  XlaScheduler scheduler(call);
  softmax::backward(args, Parallel(scheduler));
}

constexpr char kScaled[] = "te_ffi_kernels.scaled_softmax_forward";
constexpr char kScaledGrad[] = "te_ffi_kernels.scaled_softmax_backward";
constexpr char kMasked[] = "te_ffi_kernels.scaled_masked_softmax_forward";
constexpr char kMaskedGrad[] = "te_ffi_kernels.scaled_masked_softmax_backward";
constexpr char kCausal[] = "te_ffi_kernels.scaled_upper_triang_masked_softmax_forward";
constexpr char kCausalGrad[] = "te_ffi_kernels.scaled_upper_triang_masked_softmax_backward";

template <const char* kForward, const char* kBackward, Kind kKind>
struct Both {
  Handlers<kForward, WarmForward<kKind>, Forward<kKind>> forward;
  Handlers<kBackward, WarmBackward<kKind>, Backward<kKind>> backward;
};

const Both<kScaled, kScaledGrad, Kind::kScaled> kOne;
const Both<kMasked, kMaskedGrad, Kind::kMasked> kTwo;
const Both<kCausal, kCausalGrad, Kind::kCausal> kThree;

}  // namespace
}  // namespace jaxtap::ffi
