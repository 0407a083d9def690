// What a call of a softmax target is given, checked, whatever platform it runs on. Arrays are
// [..., heads, q, k] (without a mask, heads may be missing, too); masks [..., 1, q, k] of uint8 or
// bool. Where the axes before heads are `masks` in the mask and more in the logits, they repeat.

#pragma once

#include <string>

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "softmax/softmax.h"

namespace jaxtap::ffi {

enum class SoftmaxKind { kScaled, kMasked, kCausal };

struct SoftmaxConfig {
  template <class Attributes>
  explicit SoftmaxConfig(const Attributes& attributes)
      : scale(static_cast<float>(NeedAttribute<double>(attributes, "scale_factor"))) {}

  float scale;
};

inline softmax::Shape SoftmaxShapeOf(const Array& x, SoftmaxKind kind) {
  NeedFloat(x);
  const int64_t rank = x.rank();
  const int64_t least = kind == SoftmaxKind::kMasked ? 3 : 2;
  if (rank < least) {
    throw invalid_argument(x.name, " must have at least ", least, " axes, got ", x.Text());
  }
  softmax::Shape shape;
  shape.q = x.shape[rank - 2];
  shape.k = x.shape[rank - 1];
  shape.heads = rank > 2 ? x.shape[rank - 3] : 1;
  shape.batch = rank > 2 ? x.Product(0, rank - 3) : 1;
  shape.dtype = te::float_of(x.dtype);
  shape.causal = kind == SoftmaxKind::kCausal;
  return shape;
}

// One more array of the same dtype and size.
inline void NeedAlike(const Array& array, const Array& other) {
  array.NeedDtype({other.dtype});
  NeedSize(array, other.size(), std::string("as ") + other.name);
}

// Returns how many masks there are.
inline int64_t CheckMask(const Array& mask, const softmax::Shape& shape) {
  const int64_t rank = mask.NeedDtype({DType::U8, DType::PRED}).rank();
  if (rank < 3 || mask.shape[rank - 3] != 1 || mask.shape[rank - 2] != shape.q ||
      mask.shape[rank - 1] != shape.k) {
    throw invalid_argument(mask.name, " must end in [1, ", shape.q, ", ", shape.k, "], got ",
                           mask.Text(), ". Heads share it.");
  }
  const int64_t masks = mask.Product(0, rank - 3);
  if (shape.batch != 0 && (masks == 0 || shape.batch % masks != 0)) {
    throw invalid_argument(mask.name, " must have one matrix, or one for each of a batch of ",
                           shape.batch, ", got ", masks, " in ", mask.Text());
  }
  return masks;
}

template <const char* kName, SoftmaxKind kOne>
struct SoftmaxForwardCall {
  static constexpr const char* kTarget = kName;
  static constexpr SoftmaxKind kKind = kOne;
  static constexpr bool kMasked = kKind == SoftmaxKind::kMasked;
  using Config = SoftmaxConfig;

  template <class Call>
  explicit SoftmaxForwardCall(const Call& call) {
    args.scale = ConfigOf<Config>(call, kMasked ? 2 : 1, 1).scale;
    const Array x = call.Operand(0, "input"), out = call.Result(0, "output");
    args.shape = SoftmaxShapeOf(x, kKind);
    NeedAlike(out, x);
    args.x = x.data;
    args.out = out.data;
    if constexpr (kMasked) {
      const Array mask = call.Operand(1, "mask");
      args.masks = CheckMask(mask, args.shape);
      args.mask = static_cast<const uint8_t*>(mask.data);
    }
  }

  softmax::Forward args;
};

template <const char* kName, SoftmaxKind kOne>
struct SoftmaxBackwardCall {
  static constexpr const char* kTarget = kName;
  static constexpr SoftmaxKind kKind = kOne;
  using Config = SoftmaxConfig;

  template <class Call>
  explicit SoftmaxBackwardCall(const Call& call) {
    args.scale = ConfigOf<Config>(call, 2, 1).scale;
    const Array grad = call.Operand(0, "grad_output"), softmax = call.Operand(1, "softmax_output");
    const Array out = call.Result(0, "dgrad");
    // Where it's masked, the result is zero and its gradient with it: there is no mask.
    args.shape = SoftmaxShapeOf(grad, kKind == SoftmaxKind::kMasked ? SoftmaxKind::kScaled : kKind);
    NeedAlike(softmax, grad);
    NeedAlike(out, grad);
    args.grad = grad.data;
    args.softmax = softmax.data;
    args.out = out.data;
  }

  softmax::Backward args;
};

// The six targets: `Handlers` has those of a call that is described.
template <template <class> class Forwards, template <class> class Backwards>
struct SoftmaxTargets {
  static constexpr char kScaled[] = "te_ffi_kernels.scaled_softmax_forward";
  static constexpr char kScaledGrad[] = "te_ffi_kernels.scaled_softmax_backward";
  static constexpr char kMasked[] = "te_ffi_kernels.scaled_masked_softmax_forward";
  static constexpr char kMaskedGrad[] = "te_ffi_kernels.scaled_masked_softmax_backward";
  static constexpr char kCausal[] = "te_ffi_kernels.scaled_upper_triang_masked_softmax_forward";
  static constexpr char kCausalGrad[] =
      "te_ffi_kernels.scaled_upper_triang_masked_softmax_backward";

  Forwards<SoftmaxForwardCall<kScaled, SoftmaxKind::kScaled>> scaled;
  Forwards<SoftmaxForwardCall<kMasked, SoftmaxKind::kMasked>> masked;
  Forwards<SoftmaxForwardCall<kCausal, SoftmaxKind::kCausal>> causal;
  Backwards<SoftmaxBackwardCall<kScaledGrad, SoftmaxKind::kScaled>> scaled_grad;
  Backwards<SoftmaxBackwardCall<kMaskedGrad, SoftmaxKind::kMasked>> masked_grad;
  Backwards<SoftmaxBackwardCall<kCausalGrad, SoftmaxKind::kCausal>> causal_grad;
};

}  // namespace jaxtap::ffi
