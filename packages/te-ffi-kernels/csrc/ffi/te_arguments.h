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

inline const Array& NeedQValues(const Array& array, te::Scaling scaling) {
  if (scaling == te::Scaling::kMx) return array.NeedDtype({DType::F8E4M3FN, DType::F8E5M2});
  return array.NeedDtype({DType::F8E4M3FN, DType::F8E5M2, DType::S8});
}

// MX scales: of float8_e8m0fnu, or of uint8 with the same bits.
inline const Array& NeedScales(const Array& array, te::Scaling scaling) {
  if (scaling == te::Scaling::kMx) return array.NeedDtype({DType::F8E8M0, DType::U8});
  return array.NeedDtype({DType::F32});
}

inline void NeedBlocks(const Array& array, int64_t size, const char* side) {
  if (size % te::kBlock != 0) {
    throw invalid_argument("the ", side, " of ", array.name,
                           " must be a multiple of 32 for MX blocks, got ", size, " in ",
                           array.Text());
  }
}

// Where the quantized values and scales of one direction go, once their shapes are checked.
inline void CheckDirection(const Array& x, const Matrix& matrix, const Array& qvalues,
                           const Array& scales,
                           te::Scaling scaling, bool by_column) {
  NeedQValues(qvalues, scaling);
  NeedSize(qvalues, matrix.rows * matrix.cols, "one quantized value for each of x");
  NeedScales(scales, scaling);
  if (scaling == te::Scaling::kMx) {
    NeedBlocks(x, by_column ? matrix.rows : matrix.cols,
               by_column ? "rows (axes before flatten_axis)" : "columns (axes from flatten_axis)");
    NeedSize(scales, matrix.rows * matrix.cols / te::kBlock, "one scale for 32 quantized values");
  } else if (scaling == te::Scaling::kChannel) {
    NeedSize(scales, by_column ? matrix.cols : matrix.rows, "one scale for each slice");
  } else {
    NeedSize(scales, 1, "the scale of x");
  }
}

}  // namespace jaxtap::ffi
