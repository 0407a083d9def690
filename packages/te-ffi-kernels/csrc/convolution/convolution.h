// Convolutions of activations, which are int8 or are quantized to it by image, with packed integer
// weights.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/forward.h"
#include "matmul/matmul.h"

namespace jaxtap::convolution {

constexpr int kDims = 3;  // of images: depth, height, width; what an image lacks has size 1

// Of one axis of images.
struct Axis {
  int64_t size = 1;      // of x
  int64_t out = 1;       // of y
  int64_t window = 1;    // elements that a sum goes over
  int64_t stride = 1;    // from window to window
  int64_t dilation = 1;  // from element to element of a window
  int64_t low = 0;       // zeros before the first element; negative: elements that are cut off
};

struct Args {
  const void* x = nullptr;  // [images, *sizes, channels], row-major, of any alignment
  DType x_dtype = DType::F32;  // a float, or int8 where x_scale is given
  int64_t images = 0, channels = 0;
  Axis axes[kDims];
  // Output channels come in as many groups as input channels, and each sums over its own.
  int64_t groups = 1;
  // Of k = window elements (in the order of axes) times the channels of a group rows, without
  // groups of rows.
  PackedWeights weights;
  void* y = nullptr;  // [images, *outs, weights.n], row-major, of any alignment
  DType y_dtype = DType::F32;  // a float, which int8 results are rounded to before, too
  // As in `Matmul`: added to the product, which is rounded to y's dtype.
  const void* bias = nullptr;      // [n]
  const void* residual = nullptr;  // like y
  // Between which results are cut in the end.
  bool clamps = false;
  float least = 0.0f, most = 0.0f;
  // The scale of x, or null: 1 / 127 of the largest magnitude of each image.
  const float* x_scale = nullptr;
  // Not null: y is int8, what a convolution with this x_scale would make of the float results, so
  // that it reads a quarter of the bytes and has nothing to quantize.
  const float* y_scale = nullptr;
};

// Whether there is a kernel for so many channels and groups: for all of one group, for one channel
// to each (depthwise), and for groups of whole panels of the weight.
bool has_kernel(int64_t channels, int64_t n, int64_t groups, const PanelLayout& layout);

// y = float32(sum of products) * scale of x * scale of the weight, rounded once per operation, with
// exact sums: equal bits on all instruction sets. An image with an infinity or NaN has no finite
// results, unless x_scale is given.
// Throws Error (invalid argument) for what does not fit.
void convolve(const Args& args, const Parallel& parallel, Isa isa);

}  // namespace jaxtap::convolution
