// What a call of a softmax target is given, checked, whatever platform it runs on. Arrays are
// [..., heads, q, k] (without a mask, heads may be missing, too); masks [..., 1, q, k] of uint8 or
// bool. Where the axes before heads are `masks` in the mask and more in the logits, they repeat.

#pragma once

#include <string>

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"

namespace jaxtap::ffi {

enum class SoftmaxKind { kScaled, kMasked, kCausal };

struct SoftmaxConfig {
  template <class Attributes>
  SoftmaxConfig(SoftmaxKind which, const Attributes& attributes)
      : kind(which),
        scale(static_cast<float>(NeedAttribute<double>(attributes, "scale_factor"))) {}

  SoftmaxKind kind;
  float scale;
};

// `Shape` is a kernel's: [batch, heads, q, k], a dtype, and whether it's up to the diagonal.
template <typename Shape>
Shape SoftmaxShapeOf(const Array& x, SoftmaxKind kind) {
  NeedFloat(x);
  const int64_t rank = x.rank();
  const int64_t least = kind == SoftmaxKind::kMasked ? 3 : 2;
  if (rank < least) {
    throw invalid_argument(x.name, " is ", x.Text(), ", and must have at least ", least, " axes");
  }
  Shape shape;
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
template <typename Shape>
int64_t CheckMask(const Array& mask, const Shape& shape) {
  const int64_t rank = mask.NeedDtype({DType::U8, DType::PRED}).rank();
  if (rank < 3 || mask.shape[rank - 3] != 1 || mask.shape[rank - 2] != shape.q ||
      mask.shape[rank - 1] != shape.k) {
    throw invalid_argument(mask.name, " is ", mask.Text(), ", and must end in [1, ", shape.q, ", ",
                           shape.k, "]: heads share it");
  }
  const int64_t masks = mask.Product(0, rank - 3);
  if (shape.batch != 0 && (masks == 0 || shape.batch % masks != 0)) {
    throw invalid_argument(mask.name, " is ", mask.Text(), ", with ", masks,
                           " matrices for a batch of ", shape.batch,
                           "; there must be one, or one for each");
  }
  return masks;
}

}  // namespace jaxtap::ffi
