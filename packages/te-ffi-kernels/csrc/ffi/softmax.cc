// Handlers of the six softmax targets.

#include <vector>

#include "ffi/call.h"
#include "ffi/softmax_call.h"

namespace jaxtap::ffi {
namespace {

constexpr int64_t kSide = 64;
constexpr size_t kNumbers = kSide * kSide;

template <SoftmaxKind kKind>
constexpr softmax::Shape kSquare = {1, 1, kSide, kSide, te::Float::kF32,
                                    kKind == SoftmaxKind::kCausal};

template <SoftmaxKind kKind>
void WarmForward(const SoftmaxConfig& config) {
  std::vector<float> x(kNumbers), out(kNumbers);
  std::vector<uint8_t> mask(kNumbers);
  softmax::Forward args;
  args.shape = kSquare<kKind>;
  args.scale = config.scale;
  args.x = x.data();
  args.mask = kKind == SoftmaxKind::kMasked ? mask.data() : nullptr;
  args.out = out.data();
  softmax::forward(args, Parallel());
}

template <class Op>
void Forward(const Op& given, const Parallel& parallel) {
  softmax::forward(given.args, parallel);
}

template <SoftmaxKind kKind>
void WarmBackward(const SoftmaxConfig& config) {
  std::vector<float> numbers(kNumbers), out(kNumbers);
  softmax::Backward args;
  args.shape = kSquare<kKind>;
  args.scale = config.scale;
  args.grad = args.softmax = numbers.data();
  args.out = out.data();
  softmax::backward(args, Parallel());
}

template <class Op>
void Backward(const Op& given, const Parallel& parallel) {
  softmax::backward(given.args, parallel);
}

template <class Op>
using ForwardHandlers = Handlers<Op, WarmForward<Op::kKind>, Forward<Op>>;
template <class Op>
using BackwardHandlers = Handlers<Op, WarmBackward<Op::kKind>, Backward<Op>>;

const SoftmaxTargets<ForwardHandlers, BackwardHandlers> kHandlers;

}  // namespace
}  // namespace jaxtap::ffi
