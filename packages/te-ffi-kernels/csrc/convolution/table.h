// What one instruction set offers to convolutions, beside the kernels of matmuls.
#pragma once

#include <cstdint>

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
  int8_t* qvalues;      // where results go as int8, [pixels, out.columns], instead of out.y; or null
  Scale y_scale;        // of these
};

// Rows of floats to int8.
struct Rounded {
  const uint8_t* from;  // [rows, columns] of dtype
  int64_t from_stride;  // in bytes
  DType dtype;
  int64_t rows, columns;
  Scale scale;
  int8_t* to;
  int64_t to_stride;
};

struct Table {
  int64_t lanes;  // numbers of a vector
  // Quantized values of `pixels` pixels to lines as above, from their first pixel on.
  void (*spread)(const int8_t* x, int64_t pixels, int64_t channels, float* line,
                 int64_t line_pixels);
  void (*depthwise)(const Depthwise& d);
  void (*round)(const Rounded& r);
  // zero_point times the sum of each `size` of count * size quantized values.
  void (*sum)(const int8_t* x, int64_t count, int64_t size, int32_t zero_point, int32_t* sums);
  // Columns of a row of a packed weight, from a line of four rows: bits from `shift` on of
  // every fourth byte, less the zero point.
  void (*unpack)(const uint8_t* line, int shift, int32_t mask, int32_t zero_point, int64_t columns,
                 float* to);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::convolution
