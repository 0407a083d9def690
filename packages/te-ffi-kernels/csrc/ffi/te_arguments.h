// What the handlers of Transformer Engine's operations check alike.

#pragma once

#include <cstdint>
#include <string>

#include "ffi/buffers.h"
#include "te/modes.h"

namespace jaxtap::ffi {

// An array as a matrix: the axes before `axis` are rows, the others columns.
struct Matrix {
  int64_t rows, cols;
  int64_t axis;
};

inline Matrix Flatten(const Array& array, int64_t axis, const char* attribute) {
  const int64_t rank = array.rank();
  const int64_t given = axis;
  if (axis < 0) axis += rank;
  if (axis <= 0 || axis >= rank) {
    throw invalid_argument(attribute, " must have axes of ", array.name, ", ", array.Text(), ", on "
                           "both of its sides, got ", given);
  }
  return {array.Product(0, axis), array.Product(axis, rank), axis};
}

inline const Array& NeedSize(const Array& array, int64_t size, const std::string& meaning) {
  if (array.size() != size) {
    throw invalid_argument(array.name, " must have ", size, size == 1 ? " number, " : " numbers, ",
                           meaning, ", got ", array.Text());
  }
  return array;
}

inline const Array& NeedFloat(const Array& array) {
  return array.NeedDtype({DType::F32, DType::BF16, DType::F16});
}

inline te::Scaling QuantizedScaling(int64_t value) {
  const te::Scaling scaling = te::scaling_of(value);
  if (scaling == te::Scaling::kNone) {
    throw invalid_argument("scaling_mode must be one that quantizes, got 0");
  }
  return scaling;
}

inline const Array& NeedQValues(const Array& array, te::Scaling scaling) {
  if (scaling == te::Scaling::kMx) return array.NeedDtype({DType::F8E4M3FN, DType::F8E5M2});
  return array.NeedDtype({DType::F8E4M3FN, DType::F8E5M2, DType::S8});
}

inline void NeedBlocks(const Array& array, int64_t size, const char* side) {
  if (size % te::kBlock != 0) {
    throw invalid_argument("the ", side, " of ", array.name,
                           " must be a multiple of 32 for MX blocks, got ", size, " in ",
                           array.Text());
  }
}

// The same of a side of a matrix, which blocks go along.
inline void NeedBlocks(const Array& array, const Matrix& matrix, bool by_column) {
  if (by_column) return NeedBlocks(array, matrix.rows, "rows (axes before flatten_axis)");
  NeedBlocks(array, matrix.cols, "columns (axes from flatten_axis)");
}

// Throws unless scales are, as the mode has it, one for each of `tensors`, one for each of
// `channels`, or one for 32 of `numbers`: of float8_e8m0fnu then, or of uint8 with the same bits.
inline void CheckScales(const Array& scales, te::Scaling scaling, int64_t tensors, int64_t channels,
                        int64_t numbers) {
  if (scaling == te::Scaling::kMx) {
    NeedSize(scales.NeedDtype({DType::F8E8M0, DType::U8}), numbers / te::kBlock,
             "one scale for 32 quantized values");
  } else if (scaling == te::Scaling::kChannel) {
    NeedSize(scales.NeedDtype({DType::F32}), channels, "one scale for each row or column");
  } else {
    NeedSize(scales.NeedDtype({DType::F32}), tensors,
             tensors == 1 ? "the scale of all quantized values" : "one for each group");
  }
}

// Where quantized values of x and their scales of one direction go, once their shapes are checked.
inline void CheckDirection(const Array& x, const Matrix& matrix, const Array& qvalues,
                           const Array& scales, te::Scaling scaling, bool by_column) {
  NeedSize(NeedQValues(qvalues, scaling), matrix.rows * matrix.cols,
           "one quantized value for each of x");
  if (scaling == te::Scaling::kMx) NeedBlocks(x, matrix, by_column);
  CheckScales(scales, scaling, 1, by_column ? matrix.cols : matrix.rows, qvalues.size());
}

}  // namespace jaxtap::ffi
