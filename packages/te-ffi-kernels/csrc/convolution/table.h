// What one instruction set offers to convolutions, beside the kernels of matmuls.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "matmul/kernels.h"

namespace jaxtap::convolution {

// The scale of quantized values, as quantizing uses it: see quantize_int8 in matmul/rows.inl.
struct Scale {
  float divisor, reciprocal;

  static Scale of(float scale) {
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    const float divisor = scale > 0x1p126f ? 0x1p126f : scale;
    return {divisor, 1.0f / divisor};
  }
};

// What a depthwise convolution reads of a line of an image: words of four bytes, in blocks of as many
// channels as a vector has numbers, [blocks, pixels, numbers of a vector]. A word has the `taps`
// elements of a window that lie in the line from its pixel on: the pixel's number as a float, or four
// quantized values, which one instruction multiplies and sums (plus 128 if it takes unsigned ones).
// All sums are exact.
struct Spread {
  const int8_t* x;  // what the image has of the line, [inside, stride], of which `channels` are read
  int64_t stride, channels;
  int64_t first, inside;  // pixels of zeros before it, and its pixels; zeros follow
  int64_t dilation;       // pixels from element to element of the window
  int64_t pixels;         // words of a block
  int64_t step;           // pixels from word to word: 1, 2 or 4, and 1 where words are dilated
  uint32_t* line;
};

// The weight of a depthwise convolution from a row of a packed weight: that of one element of a window
// to the words that it has a place in.
struct Unpack {
  const uint8_t* line;  // the four rows that have it
  int shift;            // bits before it, of every fourth byte
  int32_t mask, zero_point;
  int64_t columns;
  int place;         // of the element among the `taps` of a word; the first comes first
  uint32_t* words;   // [columns]
  int32_t* starts;   // [columns], what sums begin with: less by what 128, if added, adds to sums
};

// Where sums go: results of some channels of pixels that follow each other.
struct Results {
  int64_t pixels;
  int64_t n;  // channels of a pixel, of which `out.columns` are written
  float x_scale;
  const uint8_t* scales;  // float32[16] of each 16 channels, so many bytes after the one before
  int64_t scales_stride;
  Output out;       // a row for each pixel
  int8_t* qvalues;  // where results go as int8, [pixels, n], instead of out.y; or null
  Scale y_scale;    // of these
};

// Results of a line of a depthwise convolution.
struct Depthwise {
  const uint32_t* x;
  int64_t line;    // words of a block of one
  int64_t stride;  // words from window to window
  const int64_t* taps;  // where each word of the first window is, in words of the first block
  int64_t tap_count;
  const uint32_t* weights;  // [tap_count, n]
  const int32_t* starts;    // [n]
  Results to;
};

// Results of sums that are known.
struct Finished {
  const int32_t* sums;  // [pixels, stride]
  int64_t stride;
  Results to;
};

struct Table {
  int64_t lanes;  // numbers of a vector
  int64_t taps;   // elements of a line of a window that a word has: 1 or 4
  void (*spread)(const Spread& s);
  void (*depthwise)(const Depthwise& d);
  void (*finish)(const Finished& f);
  // Products of float32 results, without a residual, to int8, whose sums never leave registers; null
  // where the kernels of matmuls are faster. Of `t` that reads what `exact8` does.
  void (*multiply)(const Tile& t, const Results& to);
  // Floats of a static range, at any address, to int8.
  void (*quantize)(const void* x, DType dtype, int64_t count, Scale scale, int8_t* to);
  // zero_point times the sum of each `size` of count * size quantized values.
  void (*sum)(const int8_t* x, int64_t count, int64_t size, int32_t zero_point, int32_t* sums);
  void (*unpack)(const Unpack& u);
};

const Table& table(Isa isa);

}  // namespace jaxtap::convolution
