#include "depthwise/depthwise.h"

#include <algorithm>

#include "common/arena.h"
#include "common/error.h"
#include "common/isa_table.h"
#include "common/parallel.h"
#include "depthwise/table.h"
#include "matmul/checks.h"
#include "matmul/pack.h"

namespace jaxtap::depthwise {
namespace {

using convolution::Args;
using convolution::Axis;

constexpr int64_t kTaskProducts = 1 << 17;  // that are worth waking a thread

struct WeightsTag {};
struct ScalesTag {};
struct LinesTag {};

void check(const Args& a) {
  if (!is_float(a.x_dtype) || !is_float(a.y_dtype) || a.x_scale != nullptr ||
      a.y_scale != nullptr) {
    throw invalid_argument("depthwise convolution: x and y must be float32, bfloat16 or float16 "
                           "without scales, got ", name(a.x_dtype), " and ", name(a.y_dtype));
  }
  const PackedWeights& w = a.weights;
  if (a.images < 0 || a.channels < 1 || a.groups != a.channels || w.n != a.channels) {
    throw invalid_argument("depthwise convolution: there must be as many groups and channels of y "
                           "as channels of x, got ", a.groups, " groups, and ", a.channels, " and ",
                           w.n, " channels of ", a.images, " images");
  }
  int64_t taps = 1;
  for (const Axis& axis : a.axes) {
    if (axis.size < 0 || axis.out < 0 || axis.window < 1 || axis.stride < 1 || axis.dilation < 1) {
      throw invalid_argument("depthwise convolution: sizes must not be negative, and windows, "
                             "strides and dilations at least 1, got size ", axis.size, ", out ",
                             axis.out, ", window ", axis.window, ", stride ", axis.stride,
                             ", dilation ", axis.dilation);
    }
    taps *= axis.window;
  }
  if (w.layout.k != taps || w.layout.group != 0 || w.layout.table_id != 0) {
    throw invalid_argument("depthwise convolution: the weight must have ", taps, " rows of "
                           "integers, the elements of the window, without groups; got k = ",
                           w.layout.k, " and group = ", w.layout.group);
  }
  check_size(w.layout, w.n, w.panels, w.panel_bytes);
}

struct Weights {
  float* values;  // [taps, n]
  float* scales;  // [n]
};

// In the calling thread's memory.
Weights unpacked(const PackedWeights& w, const Table& kernels) {
  const PanelLayout& layout = w.layout;
  const uint64_t key = check_headers(w, 0, w.panels);
  check_payloads(panel_at(w, 0), layout, 0, w.panels, key, Parallel());
  const Weights found{Arena<WeightsTag>::get_array<float>(layout.k * w.n),
                      Arena<ScalesTag>::get_array<float>(w.n)};
  const int mask = layout.bits == 8 ? 255 : 15, zero_point = layout.bits == 8 ? 128 : 8;
  for (int64_t p = 0; p < w.panels; ++p) {
    const uint8_t* panel = panel_at(w, p);
    const int64_t column = p * layout.columns();
    const int columns = panel_columns(w.n, p, layout.columns());
    for (int c = 0; c < columns; ++c) {
      found.scales[column + c] = panel_scale(panel, layout, 0, c);
    }
    for (int64_t tap = 0; tap < layout.k; ++tap) {
      const int shift = static_cast<int>(8 * (tap % 4)) + (layout.high(tap) ? 4 : 0);
      kernels.unpack(panel + layout.qvalues_at(tap), shift, mask, zero_point, columns,
                     found.values + tap * w.n + column);
    }
  }
  return found;
}

}  // namespace

void convolve(const Args& args, const Parallel& parallel, Isa isa) {
  check(args);
  const Axis &d = args.axes[0], &h = args.axes[1], &w = args.axes[2];
  const int64_t rows_of_image = d.out * h.out, rows = args.images * rows_of_image;
  if (rows * w.out == 0) return;
  const Table& kernels = table(isa);
  const Weights weights = unpacked(args.weights, kernels);
  const auto x_bytes = static_cast<int64_t>(byte_size(args.x_dtype));
  const auto y_bytes = static_cast<int64_t>(byte_size(args.y_dtype));
  const int64_t n = args.channels, line_bytes = w.size * n * x_bytes;
  const auto* x = static_cast<const uint8_t*>(args.x);
  const auto from = [](const void* numbers, int64_t bytes) {
    return numbers == nullptr ? nullptr : static_cast<const uint8_t*>(numbers) + bytes;
  };
  Row shape{};
  shape.x_dtype = args.x_dtype;
  shape.channels = n;
  shape.size = w.size;
  shape.window = w.window;
  shape.stride = w.stride;
  shape.dilation = w.dilation;
  shape.low = w.low;
  shape.pixels = w.out;
  shape.scales = weights.scales;
  const int64_t products = w.out * n * args.weights.layout.k;
  parallel.ranges(rows, divide_up(kTaskProducts, products), [&](int64_t begin, int64_t end) {
    Line* lines = Arena<LinesTag>::get_array<Line>(d.window * h.window);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t image = row / rows_of_image, z = row % rows_of_image / h.out, y = row % h.out;
      Row one = shape;
      one.lines = lines;
      for (int64_t i = 0; i < d.window; ++i) {
        for (int64_t j = 0; j < h.window; ++j) {
          const int64_t plane = z * d.stride + i * d.dilation - d.low;
          const int64_t line = y * h.stride + j * h.dilation - h.low;
          if (plane < 0 || plane >= d.size || line < 0 || line >= h.size) continue;
          const int64_t at = (image * d.size + plane) * h.size + line;
          lines[one.line_count++] = {x + at * line_bytes,
                                     weights.values + (i * h.window + j) * w.window * n};
        }
      }
      const int64_t at = row * w.out * n * y_bytes;
      one.out = {static_cast<uint8_t*>(args.y) + at, args.y_dtype, n * y_bytes, n,
                 from(args.bias, 0), from(args.residual, at), args.clamps, args.least, args.most};
      kernels.row(one);
    }
  });
}

}  // namespace jaxtap::depthwise

JAXTAP_DEFINE_TABLE(depthwise)
