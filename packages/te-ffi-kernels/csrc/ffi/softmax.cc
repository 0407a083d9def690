// Handlers of the six softmax targets, with Transformer Engine's operands and attribute.

#include <vector>

#include "ffi/registry.h"
#include "ffi/softmax_call.h"
#include "ffi/stages.h"
#include "ffi/threads.h"
#include "softmax/softmax.h"

namespace jaxtap::ffi {
namespace {

using Kind = SoftmaxKind;
using Config = SoftmaxConfig;

void WarmForward(const Config& config) {
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

void Forward(const Config& config, xffi::ThreadPool pool, const Array& x, const Array* mask,
             const Array& out) {
  softmax::Forward args;
  args.shape = SoftmaxShapeOf<softmax::Shape>(x, config.kind);
  args.scale = config.scale;
  args.x = x.data;
  NeedAlike(out, x);
  args.out = out.data;
  if (mask != nullptr) {
    args.masks = CheckMask(*mask, args.shape);
    args.mask = static_cast<const uint8_t*>(mask->data);
  }
  if (x.size() == 0) return;
  XlaScheduler scheduler(pool);
  softmax::forward(args, Parallel(scheduler));
}

void WarmBackward(const Config& config) {
  constexpr int64_t kSide = 64;
  std::vector<float> numbers(kSide * kSide), out(numbers.size());
  softmax::Backward args;
  args.shape = {1, 1, kSide, kSide, te::Float::kF32, config.kind == Kind::kCausal};
  args.scale = config.scale;
  args.grad = args.softmax = numbers.data();
  args.out = out.data();
  softmax::backward(args, Parallel());
}

void Backward(const Config& config, xffi::ThreadPool pool, const Array& grad,
              const Array& softmax_output, const Array& out) {
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
  XlaScheduler scheduler(pool);
  softmax::backward(args, Parallel(scheduler));
}

using In = xffi::AnyBuffer;
using Out = xffi::Result<xffi::AnyBuffer>;

// A macro, since a handler is a function without a state: one for each target.
#define JAXTAP_SOFTMAX(NAME, KIND, TARGET)                                                        \
  XLA_FFI_DEFINE_HANDLER(kInstantiate##NAME,                                                      \
                         [](xffi::Dictionary attributes) {                                        \
                           return Warmed(TARGET "_forward",                                       \
                                         [&] { WarmForward(Config(KIND, attributes)); });         \
                         },                                                                       \
                         xffi::Ffi::BindInstantiate().Attrs());                                   \
  XLA_FFI_DEFINE_HANDLER(kInstantiateGrad##NAME,                                                  \
                         [](xffi::Dictionary attributes) {                                        \
                           return Warmed(TARGET "_backward",                                      \
                                         [&] { WarmBackward(Config(KIND, attributes)); });        \
                         },                                                                       \
                         xffi::Ffi::BindInstantiate().Attrs());                                   \
  XLA_FFI_DEFINE_HANDLER(                                                                         \
      kExecuteGrad##NAME,                                                                         \
      [](xffi::ThreadPool pool, In grad, In softmax_output, Out out,                              \
         xffi::Dictionary attributes) {                                                           \
        return Guarded(TARGET "_backward", [&] {                                                  \
          Backward(Config(KIND, attributes), pool, Read("grad_output", grad),                     \
                   Read("softmax_output", softmax_output), Read("dgrad", out));                   \
        });                                                                                       \
      },                                                                                          \
      xffi::Ffi::Bind().Ctx<xffi::ThreadPool>().Arg<In>().Arg<In>().Ret<In>().Attrs());           \
  const Registration kRegistrationGrad##NAME(                                                     \
      {TARGET "_backward", kInstantiateGrad##NAME, kExecuteGrad##NAME});                          \
  const Registration kRegistration##NAME({TARGET "_forward", kInstantiate##NAME, kExecute##NAME});

#define JAXTAP_SOFTMAX_FORWARD(NAME, KIND, TARGET)                                                \
  XLA_FFI_DEFINE_HANDLER(                                                                         \
      kExecute##NAME,                                                                             \
      [](xffi::ThreadPool pool, In x, Out out, xffi::Dictionary attributes) {                     \
        return Guarded(TARGET "_forward", [&] {                                                   \
          Forward(Config(KIND, attributes), pool, Read("input", x), nullptr,                      \
                  Read("output", out));                                                           \
        });                                                                                       \
      },                                                                                          \
      xffi::Ffi::Bind().Ctx<xffi::ThreadPool>().Arg<In>().Ret<In>().Attrs());                     \
  JAXTAP_SOFTMAX(NAME, KIND, TARGET)

XLA_FFI_DEFINE_HANDLER(
    kExecuteMasked,
    [](xffi::ThreadPool pool, In x, In mask_buffer, Out out, xffi::Dictionary attributes) {
      return Guarded("te_ffi_kernels.scaled_masked_softmax_forward", [&] {
        const Array mask = Read("mask", mask_buffer);
        Forward(Config(Kind::kMasked, attributes), pool, Read("input", x), &mask,
                Read("output", out));
      });
    },
    xffi::Ffi::Bind().Ctx<xffi::ThreadPool>().Arg<In>().Arg<In>().Ret<In>().Attrs());

JAXTAP_SOFTMAX(Masked, Kind::kMasked, "te_ffi_kernels.scaled_masked_softmax")
JAXTAP_SOFTMAX_FORWARD(Scaled, Kind::kScaled, "te_ffi_kernels.scaled_softmax")
JAXTAP_SOFTMAX_FORWARD(Causal, Kind::kCausal,
                       "te_ffi_kernels.scaled_upper_triang_masked_softmax")

}  // namespace
}  // namespace jaxtap::ffi
