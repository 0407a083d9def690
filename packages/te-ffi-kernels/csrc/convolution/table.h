// What one instruction set offers to convolutions, beside the kernels of matmuls.
#pragma once

#include <cstdint>

#include "matmul/kernels.h"

namespace jaxtap::convolution {

// A row of results of a depthwise convolution: channels times pixels. Lines of x are in blocks of as
// many channels as a vector has numbers, [blocks, pixels of a line, numbers of a vector]: whole
// numbers, so that all sums are exact.
struct Depthwise {
  const float* x;
  int64_t line;    // pixels of one
  int64_t stride;  // pixels from window to window
  const int64_t* taps;  // where each element of the first window is, in pixels of the first block
  int64_t tap_count;
  const float* weights;  // [tap_count, channels]
  int64_t pixels;        // of the result
  float x_scale;
  const float* scales;  // [channels]
  Output out;           // a row for each pixel, out.columns of channels
};

struct Table {
  int64_t lanes;  // numbers of a vector
  // Quantized values of `pixels` pixels to lines as above, from their first pixel on.
  void (*spread)(const int8_t* x, int64_t pixels, int64_t channels, float* line,
                 int64_t line_pixels);
  void (*depthwise)(const Depthwise& d);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::convolution
