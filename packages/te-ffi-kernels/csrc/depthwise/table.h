// What one instruction set offers to depthwise convolutions of floats.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "matmul/kernels.h"

namespace jaxtap::depthwise {

// What a window reads of one line of an image.
struct Line {
  const uint8_t* x;      // [size, channels], the whole line, of any alignment
  const float* weights;  // [window, channels]
};

// A row of results: pixels times channels.
struct Row {
  const Line* lines;  // those that the image has
  int64_t line_count;
  DType x_dtype;
  int64_t channels;
  // Along the line, as in convolution::Axis.
  int64_t size, window, stride, dilation, low;
  int64_t pixels;
  const float* scales;  // [channels]
  Output out;           // a row for each pixel
};

struct Table {
  void (*row)(const Row& r);
  // Columns of a row of a packed weight, from a line of four rows: bits from `shift` on of every
  // fourth byte, less the zero point.
  void (*unpack)(const uint8_t* line, int shift, int32_t mask, int32_t zero_point, int64_t columns,
                 float* to);
};

// That of an instruction set, and of the one that selected_isa() names, which throws as that.
const Table& table(Isa isa);
const Table& table();

}  // namespace jaxtap::depthwise
