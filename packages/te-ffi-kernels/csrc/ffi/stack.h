// One array of a stack, read where it lies. `OneOf` reads the index: for platforms whose memory it is
// in.

#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/buffers.h"

namespace jaxtap::ffi {

inline void NeedStack(const Array& stack) {
  if (stack.rank() != 0 && stack.shape[0] != 0) return;
  throw invalid_argument(stack.name, " must be a stack of one or more, got ", stack.Text());
}

// Array `index` along the first axis of a stack. A negative index counts from the end, and one
// beyond the ends is the end, as XLA's slices have it.
inline Array OneOf(const Array& stack, int32_t index) {
  NeedStack(stack);
  const int64_t count = stack.shape[0], size = stack.Product(1, stack.rank());
  const int64_t place = std::clamp<int64_t>(index < 0 ? index + count : index, 0, count - 1);
  Array one = stack;
  one.shape = {stack.shape.sizes + 1, stack.shape.rank - 1};
  one.data = static_cast<char*>(stack.data) +
             place * size * static_cast<int64_t>(byte_size(stack.dtype));
  return one;
}

}  // namespace jaxtap::ffi
