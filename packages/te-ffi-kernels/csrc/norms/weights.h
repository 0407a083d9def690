// Weights as float32, in memory of the calling thread.
#pragma once

#include <cstdint>

#include "common/arena.h"
#include "te/table.h"

namespace jaxtap::norms {

template <typename Tag>
const float* weights(const void* from, te::Float dtype, int64_t count, bool zero_centered) {
  if (dtype == te::Float::kF32 && !zero_centered) return static_cast<const float*>(from);
  float* to = Arena<Tag>::template get_array<float>(count);
  te::table().load[static_cast<int>(dtype)](from, to, count);
  if (zero_centered) {
    for (int64_t i = 0; i < count; ++i) to[i] += 1.0f;
  }
  return to;
}

}  // namespace jaxtap::norms
