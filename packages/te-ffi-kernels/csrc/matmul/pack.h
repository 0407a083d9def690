// From quantized values and scales to packed weights, and back.
#pragma once

#include <cstdint>

#include "common/packed.h"
#include "common/parallel.h"

namespace jaxtap {

// Packs `qvalues`, int8[k, n] row-major, and `scales`, floats of layout.scale_kind [G, n] with G =
// 1 for group 0 and k / group else, into `out`, uint8[panels, panel_bytes] (see common/packed.h).
// Quantized values are places in the table where the layout has one, from 0 to 15.
// `column_scales`, float[n], are those of a layout that has them. Nothing needs to be aligned.
// Throws Error (invalid argument): a wrong size of `out`, or a value beyond 4 bits.
void pack(const int8_t* qvalues, const void* scales, int64_t n, const PanelLayout& layout,
          uint8_t* out, int64_t panels, int64_t panel_bytes, const Parallel& parallel,
          const void* column_scales = nullptr);

// The reverse of `pack`. Throws Error (invalid argument) for what is not a packed weight of this
// layout.
void unpack(const uint8_t* buffer, int64_t panels, int64_t panel_bytes, int64_t n,
            const PanelLayout& layout, int8_t* qvalues, void* scales, const Parallel& parallel,
            void* column_scales = nullptr);

// Throws Error (invalid argument) where `panels` of `panel_bytes` are not n columns of a layout.
void check_size(const PanelLayout& layout, int64_t n, int64_t panels, int64_t panel_bytes);

}  // namespace jaxtap
