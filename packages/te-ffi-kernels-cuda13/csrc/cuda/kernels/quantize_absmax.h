// Bits of the largest magnitude of each row and each column, where the scales will be.
#pragma once

#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

// What a block does with its tile.
template <class Source>
JAXTAP_DEVICE void absmax_of_tile(const TilesOf<Source>& args, const Place& place) {
  __shared__ int of_columns[kTile];
  float x[kPart][kPart];
  args.source.part(args, place, x);
  if (threadIdx.x < kTile) of_columns[threadIdx.x] = 0;
  __syncthreads();
  JAXTAP_UNROLL
  for (int i = 0; i < kPart; ++i) {
    int of_row = 0;
    JAXTAP_UNROLL
    for (int j = 0; j < kPart; ++j) of_row = larger(of_row, magnitude(x[i][j]));
    of_row = largest_of<kParts>(of_row);
    if (args.qvalues != nullptr && place.across == 0 && place.row + i < args.rows) {
      atomicMax(static_cast<int*>(args.scales) + place.row + i, of_row);
    }
  }
  if (args.colwise == nullptr) return;  // all threads of the block alike
  JAXTAP_UNROLL
  for (int j = 0; j < kPart; ++j) {
    int of_column = 0;
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) of_column = larger(of_column, magnitude(x[i][j]));
    atomicMax(of_columns + place.across * kPart + j, of_column);
  }
  __syncthreads();
  const int64_t col = place.col - place.across * kPart + threadIdx.x;
  if (threadIdx.x < kTile && col < args.cols) {
    atomicMax(static_cast<int*>(args.colwise_scales) + col, of_columns[threadIdx.x]);
  }
}

template <class Source>
__global__ void quantize_absmax_kernel(TilesOf<Source> args) {
  absmax_of_tile(args, Place::of(args, blockIdx.x));
}

template <class Source>
void absmax_of(const Quantize& given, const Source& source, Stream stream) {
  const TilesOf<Source> args = tile_args(given, source);
  launch(quantize_absmax_kernel<Source>, tile_blocks(args), kTileThreads, stream, args);
}

}  // namespace
}  // namespace jaxtap::cuda
