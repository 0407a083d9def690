// The attributes of Transformer Engine's operations, with its numbers, and those that are ours.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/error.h"
#include "te/table.h"

namespace jaxtap::te {

// How scales are made, and what shares one.
enum class Scaling : int64_t {
  kNone = 0,
  kDelayedTensor = 1,  // one scale, given; of what earlier arrays were
  kMx = 2,             // one power of two for 32 numbers
  kCurrentTensor = 3,  // one scale, given; of what this array is
  kNvfp4 = 4,
  kNvfp4Blocks = 5,
  kChannel = 64,  // ours: one scale for each row, or for each column
};

// Which results are wanted: quantized values whose scales go along rows, and along columns.
enum class Layout : int64_t { kRowwise = 0, kColwise = 1, kBoth = 2 };

constexpr bool is_tensor(Scaling scaling) {
  return scaling == Scaling::kDelayedTensor || scaling == Scaling::kCurrentTensor;
}
constexpr bool has_rowwise(Layout layout) { return layout != Layout::kColwise; }
constexpr bool has_colwise(Layout layout) { return layout != Layout::kRowwise; }
// Whether quantized values by column are transposed. MX leaves them where they are.
constexpr bool turns(Scaling scaling) { return scaling != Scaling::kMx; }

inline Float float_of(DType type) {
  return type == DType::F32 ? Float::kF32 : type == DType::BF16 ? Float::kBF16 : Float::kF16;
}

inline QType qtype_of(DType type) {
  return type == DType::F8E4M3FN ? QType::kE4M3
         : type == DType::F8E5M2 ? QType::kE5M2
                                 : QType::kInt8;
}

// The largest number of a format.
constexpr float largest(QType qtype) {
  return qtype == QType::kE4M3 ? 448.0f : qtype == QType::kE5M2 ? 57344.0f : 127.0f;
}

// Throws for numbers without a meaning, and for what Transformer Engine has on GPUs alone.
inline Scaling scaling_of(int64_t value) {
  if (value == 4 || value == 5) {
    throw invalid_argument("scaling_mode must not be NVFP4, which no kernel has, got ", value,
                           ". Use MXFP8 (2).");
  }
  if ((value < 0 || value > 3) && value != 64) {
    throw invalid_argument("scaling_mode must be 0 (none), 1 (delayed, per tensor), 2 (MXFP8), 3 "
                           "(current, per tensor) or 64 (per channel), got ", value);
  }
  return static_cast<Scaling>(value);
}

inline Layout layout_of(int64_t value) {
  if (value < 0 || value > 2) {
    throw invalid_argument("q_layout must be 0 (rowwise), 1 (colwise) or 2 (both), got ", value);
  }
  return static_cast<Layout>(value);
}

}  // namespace jaxtap::te
