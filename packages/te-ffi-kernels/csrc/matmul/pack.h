// From codes and scales to packed weights, and back.
#pragma once

#include <cstdint>

#include "common/parallel.h"

namespace jaxtap {

// Packs `codes`, int8[k, n] row-major, and `scales`, float32[G, n] with G = 1 for group 0 and k /
// group else, into `out`, uint8[ceil(n / 16), panel_bytes] (see common/packed.h).
// Throws Error (invalid argument): bits or group that the format does not have, a wrong size of
// `out`, or a code beyond 4 bits.
void pack(const int8_t* codes, const float* scales, int64_t k, int64_t n, int64_t group, int bits,
          uint8_t* out, int64_t panels, int64_t panel_bytes, const Parallel& parallel);

// The reverse of `pack`. Throws Error (invalid argument) for what is not a packed weight of this
// shape.
void unpack(const uint8_t* buffer, int64_t panels, int64_t panel_bytes, int64_t k, int64_t n,
            int64_t group, int bits, int8_t* codes, float* scales, const Parallel& parallel);

}  // namespace jaxtap
