// The quantized values of a matrix and their transpose in one pass, the scales of MX blocks, and
// the largest magnitude.
#pragma once

#include "cuda/kernels/quantize_tile.h"

namespace jaxtap::cuda {
namespace {

constexpr int kBlocks = kTile / te::kBlock;      // MX blocks along a side of a tile
constexpr int kBlockParts = te::kBlock / kPart;  // threads along an MX block

enum class Kind { kTensor, kChannel, kMx };

// A tile's transposed quantized values, four of a column in each word.
using Turned = uint32_t[kTile][kParts + 1];

// Four quantized values of a row.
JAXTAP_DEVICE void write_four(uint8_t* to, int64_t left, bool wide, uint32_t four) {
  if (wide && left >= kPart) {
    *reinterpret_cast<uint32_t*>(to) = four;
    return;
  }
  JAXTAP_UNROLL
  for (int j = 0; j < kPart; ++j) {
    if (j < left) to[j] = static_cast<uint8_t>(four >> (8 * j));
  }
}

JAXTAP_DEVICE void write_rows(const TileArgs& args, const Place& place, uint8_t* qvalues, bool wide,
                              const uint32_t (&four)[kPart]) {
  JAXTAP_UNROLL
  for (int i = 0; i < kPart; ++i) {
    if (place.row + i < args.rows) {
      write_four(qvalues + (place.row + i) * args.cols + place.col, args.cols - place.col, wide,
                 four[i]);
    }
  }
}

// Quantized values of rows, four in each word, to the transposed array. All threads of the block
// call this.
JAXTAP_DEVICE void write_turned(const TileArgs& args, const Place& place, Turned& colwise,
                                const uint32_t (&four)[kPart]) {
  JAXTAP_UNROLL
  for (int j = 0; j < kPart; ++j) {
    uint32_t column = 0;
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) column |= (four[i] >> (8 * j) & 0xffu) << (8 * i);
    colwise[place.across * kPart + j][place.down] = column;
  }
  __syncthreads();
  // Threads beside each other have quantized values that follow each other in a column.
  const int64_t first_row = place.row - place.down * kPart;
  const int64_t first_col = place.col - place.across * kPart;
  const int64_t row = first_row + place.across * kPart;
  JAXTAP_UNROLL
  for (int s = 0; s < kTile; s += kParts) {
    const int at = s + place.down;
    if (first_col + at < args.cols && row < args.rows) {
      write_four(args.colwise + (first_col + at) * args.rows + row, args.rows - row,
                 args.wide_turned, colwise[at][place.across]);
    }
  }
}

template <class Numbers>
JAXTAP_DEVICE void encode_rows(QType qtype, const Numbers& at, uint32_t (&four)[kPart]) {
  JAXTAP_UNROLL
  for (int i = 0; i < kPart; ++i) {
    float x[kPart];
    JAXTAP_UNROLL
    for (int j = 0; j < kPart; ++j) x[j] = at(i, j);
    four[i] = encode_four(qtype, x);
  }
}

JAXTAP_DEVICE int block_scale(QType qtype, int absmax) {
  return qtype == QType::kE4M3 ? quantized::block_scale<E4M3>(absmax)
                             : quantized::block_scale<E5M2>(absmax);
}

JAXTAP_DEVICE void mx(const TileArgs& args, const Place& place, const float (&x)[kPart][kPart],
                      int (&of_columns)[kBlocks][kTile]) {
  uint32_t four[kPart];
  if (args.qvalues != nullptr) {
    auto* scales = static_cast<uint8_t*>(args.scales);
    quantized::Power by[kPart];
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) {
      int most = 0;
      JAXTAP_UNROLL
      for (int j = 0; j < kPart; ++j) most = larger(most, magnitude(x[i][j]));
      const int scale = block_scale(args.qtype, largest_of<kBlockParts>(most));
      by[i] = quantized::inverse(scale);
      if (place.across % kBlockParts == 0 && place.row + i < args.rows && place.col < args.cols) {
        scales[(place.row + i) * (args.cols / te::kBlock) + place.col / te::kBlock] =
            static_cast<uint8_t>(scale);
      }
    }
    encode_rows(
        args.qtype, [&](int i, int j) { return x[i][j] * by[i].factor * by[i].half; }, four);
    write_rows(args, place, args.qvalues, args.wide, four);
  }
  if (args.colwise == nullptr) return;
  if (threadIdx.x < kBlocks * kTile) of_columns[threadIdx.x / kTile][threadIdx.x % kTile] = 0;
  __syncthreads();
  const int block = place.down / kBlockParts;
  JAXTAP_UNROLL
  for (int j = 0; j < kPart; ++j) {
    int most = 0;
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) most = larger(most, magnitude(x[i][j]));
    atomicMax(&of_columns[block][place.across * kPart + j], most);
  }
  __syncthreads();
  auto* scales = static_cast<uint8_t*>(args.colwise_scales);
  quantized::Power by[kPart];
  JAXTAP_UNROLL
  for (int j = 0; j < kPart; ++j) {
    const int scale = block_scale(args.qtype, of_columns[block][place.across * kPart + j]);
    by[j] = quantized::inverse(scale);
    if (place.down % kBlockParts == 0 && place.row < args.rows && place.col + j < args.cols) {
      scales[place.row / te::kBlock * args.cols + place.col + j] = static_cast<uint8_t>(scale);
    }
  }
  encode_rows(args.qtype, [&](int i, int j) { return x[i][j] * by[j].factor * by[j].half; }, four);
  write_rows(args, place, args.colwise, args.wide && args.wide_turned, four);
}

// What a block does with its tile.
template <Kind kKind, class Source>
JAXTAP_DEVICE void encode_tile(const TilesOf<Source>& args, const Place& place) {
  float x[kPart][kPart];
  args.source.part(args, place, x);
  if constexpr (kKind == Kind::kMx) {
    __shared__ int of_columns[kBlocks][kTile];
    mx(args, place, x, of_columns);
  } else {
    __shared__ Turned colwise;
    uint32_t four[kPart];
    if constexpr (kKind == Kind::kTensor) {
      if (args.absmax != nullptr) {
        __shared__ int scratch[kTileThreads / kWarp];
        int most = 0;
        JAXTAP_UNROLL
        for (int i = 0; i < kPart; ++i) {
          JAXTAP_UNROLL
          for (int j = 0; j < kPart; ++j) most = larger(most, magnitude(x[i][j]));
        }
        most = largest_of_block(most, scratch);
        if (threadIdx.x == 0) atomicMax(args.absmax, most);
        if (args.qvalues == nullptr && args.colwise == nullptr) return;
      }
      const float scale = *args.scale;
      encode_rows(args.qtype, [&](int i, int j) { return x[i][j] * scale; }, four);
      if (args.qvalues != nullptr) write_rows(args, place, args.qvalues, args.wide, four);
      if (args.colwise != nullptr) write_turned(args, place, colwise, four);
    } else {
      float by[kPart];
      if (args.qvalues != nullptr) {
        const auto* absmax = static_cast<const int*>(args.scales);
        JAXTAP_UNROLL
        for (int i = 0; i < kPart; ++i) {
          by[i] = place.row + i < args.rows ? channel_scale(absmax[place.row + i], args.qtype) : 1;
        }
        encode_rows(args.qtype, [&](int i, int j) { return x[i][j] * by[i]; }, four);
        write_rows(args, place, args.qvalues, args.wide, four);
      }
      if (args.colwise != nullptr) {
        const auto* absmax = static_cast<const int*>(args.colwise_scales);
        JAXTAP_UNROLL
        for (int j = 0; j < kPart; ++j) {
          by[j] = place.col + j < args.cols ? channel_scale(absmax[place.col + j], args.qtype) : 1;
        }
        encode_rows(args.qtype, [&](int i, int j) { return x[i][j] * by[j]; }, four);
        write_turned(args, place, colwise, four);
      }
    }
  }
}

template <class Source, Kind kKind>
__global__ void quantize_values_kernel(TilesOf<Source> args) {
  encode_tile<kKind>(args, Place::of(args, blockIdx.x));
}

template <class Source>
void values_of(const Quantize& given, const Source& source, Stream stream) {
  const TilesOf<Source> args = tile_args(given, source);
  const int64_t blocks = tile_blocks(args);
  if (te::is_tensor(given.scaling)) {
    launch(quantize_values_kernel<Source, Kind::kTensor>, blocks, kTileThreads, stream, args);
  } else if (given.scaling == te::Scaling::kChannel) {
    launch(quantize_values_kernel<Source, Kind::kChannel>, blocks, kTileThreads, stream, args);
  } else {
    launch(quantize_values_kernel<Source, Kind::kMx>, blocks, kTileThreads, stream, args);
  }
}

}  // namespace
}  // namespace jaxtap::cuda
