// Sums over the rows of what is quantized.
#pragma once

#include "cuda/kernels/column_sums_of.h"
#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

template <class Of>
struct NumbersOf {
  static constexpr int kKinds = 1;
  Of source;
  TileArgs tile;

  __device__ __forceinline__ void add(int64_t row, int64_t col, float (&sums)[1]) const {
    sums[0] += source.number(tile, row, col);
  }
};

template <class Of>
void sums_of(const Quantize& given, const Of& source, Stream stream) {
  NumbersOf<Of> numbers = {source, {}};
  numbers.tile.rows = given.rows;
  numbers.tile.cols = given.cols;
  ColumnSums sums;
  sums.rows = given.rows;
  sums.cols = given.cols;
  sums.dtype = given.dtype;
  sums.out[0] = given.sums;
  sums.parts = given.parts;
  column_sums(sums, numbers, stream);
}

}  // namespace
}  // namespace jaxtap::cuda
