// Small arrays of any dtype of numbers, as float32.

#pragma once

#include "common/arena.h"
#include "common/convert.h"
#include "ffi/buffers.h"

namespace jaxtap::ffi {

// In memory of this thread. F32, BF16, F16, S16, S32 and S64.
template <typename Tag>
const float* ToFloats(const Array& array) {
  const int64_t count = array.size();
  float* out = Arena<Tag>::template get_array<float>(count);
  for (int64_t i = 0; i < count; ++i) {
    switch (array.dtype) {
      case DType::F32: out[i] = static_cast<const float*>(array.data)[i]; break;
      case DType::BF16: out[i] = bf16_to_f32(static_cast<const uint16_t*>(array.data)[i]); break;
      case DType::F16: out[i] = f16_to_f32(static_cast<const uint16_t*>(array.data)[i]); break;
      case DType::S16:
        out[i] = static_cast<float>(static_cast<const int16_t*>(array.data)[i]);
        break;
      case DType::S32:
        out[i] = static_cast<float>(static_cast<const int32_t*>(array.data)[i]);
        break;
      default: out[i] = static_cast<float>(static_cast<const int64_t*>(array.data)[i]);
    }
  }
  return out;
}

// One number of F32, BF16 or F16.
inline void SetFloat(const Array& array, int64_t index, float value) {
  if (array.dtype == DType::F32) {
    static_cast<float*>(array.data)[index] = value;
  } else {
    static_cast<uint16_t*>(array.data)[index] =
        array.dtype == DType::BF16 ? f32_to_bf16(value) : f32_to_f16(value);
  }
}

}  // namespace jaxtap::ffi
