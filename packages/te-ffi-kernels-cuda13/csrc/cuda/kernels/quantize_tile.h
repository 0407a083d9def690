// How kernels share out a matrix: blocks have tiles of 64 x 64, threads 4 x 4 of their numbers.
#pragma once

#include "cuda/formats.h"
#include "cuda/kernels/quantize.h"

namespace jaxtap::cuda {
namespace {

constexpr int kTile = 64, kPart = 4;
constexpr int kParts = kTile / kPart;  // threads along a side
constexpr int kTileThreads = kParts * kParts;

struct TileArgs {
  const float* scale;
  uint8_t *qvalues, *colwise;
  void *scales, *colwise_scales;
  int* absmax;  // bits, to which the largest magnitude is added; nullptr where it isn't wanted
  int64_t rows, cols, tiles_across;
  QType qtype;
  bool wide;         // rows of x, and of quantized values, may be read and written in vectors of 4
  bool wide_turned;  // likewise those of transposed quantized values
};

// A Source has the matrix's numbers, or computes them. It has
//   Format      which sums are rounded to
//   wide        whether four numbers of a row may be read in a vector, where rows begin at multiples
//               of four
//   part        the numbers of a Place; zeros beyond the matrix
//   number      one of them; where there are sums over rows
template <class Source>
struct TilesOf : TileArgs {
  Source source;
};

inline int64_t tile_blocks(const TileArgs& args) {
  return ceil_of(args.rows, kTile) * args.tiles_across;
}

template <class Source>
TilesOf<Source> tile_args(const Quantize& given, const Source& source) {
  TilesOf<Source> args = {};
  args.source = source;
  args.scale = given.scale;
  args.qvalues = given.qvalues;
  args.colwise = given.colwise;
  args.scales = given.scales;
  args.colwise_scales = given.colwise_scales;
  args.absmax = reinterpret_cast<int*>(given.updated_amax);
  args.rows = given.rows;
  args.cols = given.cols;
  args.tiles_across = ceil_of(given.cols, kTile);
  args.qtype = given.qtype;
  args.wide = given.cols % kPart == 0 && aligned(4, given.qvalues) && source.wide();
  args.wide_turned = (te::turns(given.scaling) ? given.rows : given.cols) % kPart == 0 &&
                     aligned(4, given.colwise);
  return args;
}

// Where a thread's numbers are: rows [row, row + 4) of columns [col, col + 4), as far as they
// exist.
struct Place {
  int64_t row, col;
  int down, across;  // of threads in the tile

  JAXTAP_DEVICE Place of(const TileArgs& args, int64_t tile) {
    const int down = threadIdx.x / kParts, across = threadIdx.x % kParts;
    return {tile / args.tiles_across * kTile + down * kPart,
            tile % args.tiles_across * kTile + across * kPart, down, across};
  }
};

// The numbers of an array.
template <class Of>
struct Stored {
  using Format = Of;
  const typename Of::Type* x;

  bool wide() const { return aligned(4 * sizeof(typename Of::Type), x); }

  __device__ __forceinline__ float number(const TileArgs& args, int64_t row, int64_t col) const {
    return Of::load(x[row * args.cols + col]);
  }

  __device__ __forceinline__ void part(const TileArgs& args, const Place& place,
                                       float (&out)[kPart][kPart]) const {
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) {
      const bool inside = place.row + i < args.rows;
      const int64_t left = inside ? args.cols - place.col : 0;
      load<Of>(x + (place.row + i) * args.cols + place.col, left, args.wide, out[i]);
    }
  }
};

// Calls run(source) for the numbers of the array x.
template <class Run>
void of_array(const Quantize& given, Run&& run) {
  by_float(given.dtype, [&](auto of) {
    run(Stored<decltype(of)>{static_cast<const typename decltype(of)::Type*>(given.x)});
  });
}

// What a slice of this largest magnitude is multiplied with, as the CPU's channel_scale.
JAXTAP_DEVICE float channel_scale(int absmax, QType qtype) {
  if (absmax == 0 || absmax >= 0x7f800000) return 1.0f;
  constexpr float kMost = 0x1p126f;
  const float scale = te::largest(qtype) / bits_float(static_cast<uint32_t>(absmax));
  return scale < kMost ? scale : kMost;
}

}  // namespace
}  // namespace jaxtap::cuda
