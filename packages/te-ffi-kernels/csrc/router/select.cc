#include <algorithm>
#include <functional>

#include "common/arena.h"
#include "common/convert.h"
#include "router/table.h"

namespace jaxtap::router {

void select_any(const float* scores, int64_t n, int64_t k, int32_t* chosen) {
  struct Keys {};
  // The order of scores above, and below it that of indices, the lower first.
  uint64_t* keys = Arena<Keys>::get_array<uint64_t>(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_bits(scores[i]);
    const uint32_t key = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    keys[i] = static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(i));
  }
  if (k < n) std::nth_element(keys, keys + k, keys + n, std::greater<uint64_t>());
  for (int64_t i = 0; i < k; ++i) {
    chosen[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(keys[i]));
  }
  std::sort(chosen, chosen + k);
}

}  // namespace jaxtap::router
