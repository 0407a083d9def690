#include "convolution/convolution.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/arena.h"
#include "common/convert.h"
#include "common/error.h"
#include "common/isa_table.h"
#include "common/parallel.h"
#include "convolution/table.h"
#include "matmul/checks.h"
#include "matmul/kernels.h"
#include "matmul/pack.h"
#include "te/modes.h"
#include "training/table.h"

namespace jaxtap::convolution {
namespace {

// Sums of depthwise convolutions are exact in float32: 127 * 128 * 1032 < 2^24.
constexpr int64_t kMostTaps = 1032;
constexpr int64_t kSerialBelow = 1 << 14;  // numbers that aren't worth a second thread
// Reads of whole words end at most so far after an image.
constexpr int64_t kSlack = 64;
// Pixels of a line of results where windows have one element, at most; and of an image, which are few
// for a task.
constexpr int64_t kLinePixels = 128, kFewPixels = 256;
// Of lines that a depthwise convolution holds: they fit every second cache, and what a task does for
// each row is little beside the row.
constexpr int64_t kHeldBytes = 96 << 10;
// Pixels whose sums are in the first cache before they are int8: a multiple of what kernels multiply
// at once.
constexpr int64_t kRoundedRows = 48;

struct ImageTag {};
struct PixelSumsTag {};
struct OffsetsTag {};
struct RowScalesTag {};
struct PartsTag {};
struct WeightsTag {};
struct ScalesTag {};
struct StartsTag {};
struct ExpandedTag {};
struct ExpandedScalesTag {};
struct SumsTag {};
struct RunsTag {};
struct LineTag {};
struct LinesTag {};
struct PlacesTag {};

int64_t product_of(const Args& args, int64_t Axis::*size) {
  int64_t product = 1;
  for (const Axis& axis : args.axes) product *= axis.*size;
  return product;
}

bool is_depthwise(const Args& args) {
  return args.groups > 1 && args.channels == args.groups && args.weights.n == args.groups;
}

void check(const Args& a) {
  if (!is_float(a.x_dtype) && (a.x_dtype != DType::S8 || a.x_scale == nullptr)) {
    throw invalid_argument("convolution: x must be float32, bfloat16 or float16, or int8 with a "
                           "scale, got ", name(a.x_dtype));
  }
  if (!is_float(a.y_dtype)) {
    throw invalid_argument("convolution: y must be float32, bfloat16 or float16, got ",
                           name(a.y_dtype));
  }
  const PackedWeights& w = a.weights;
  if (a.images < 0 || a.channels < 1 || w.n < 1 || a.groups < 1 || a.channels % a.groups != 0 ||
      w.n % a.groups != 0) {
    throw invalid_argument("convolution: groups must divide the channels of x and y, got ",
                           a.groups, " groups, ", a.channels, " and ", w.n, " channels of ",
                           a.images, " images");
  }
  for (const Axis& axis : a.axes) {
    if (axis.size < 0 || axis.out < 0 || axis.window < 1 || axis.stride < 1 || axis.dilation < 1) {
      throw invalid_argument("convolution: sizes must not be negative, and windows, strides and "
                             "dilations at least 1, got size ", axis.size, ", out ", axis.out,
                             ", window ", axis.window, ", stride ", axis.stride, ", dilation ",
                             axis.dilation);
    }
  }
  const int64_t taps = product_of(a, &Axis::window), k = taps * (a.channels / a.groups);
  if (w.layout.k != k || w.layout.group != 0) {
    throw invalid_argument("convolution: the weight must have ", k, " rows, elements of the window "
                           "times input channels, without groups; got k = ", w.layout.k,
                           " and group = ", w.layout.group);
  }
  if (k > kExactK || (is_depthwise(a) && taps > kMostTaps)) {
    throw invalid_argument("convolution: sums must have at most ", kExactK, " products, and ",
                           kMostTaps, " if depthwise, got ", k);
  }
  if (!has_kernel(a.channels, w.n, a.groups, w.layout)) {
    throw invalid_argument("convolution: groups must be 1, the channels of x and y, or of whole "
                           "panels of ", w.layout.columns(), " output channels, got ", a.groups,
                           " groups of ", w.n, " output channels");
  }
  check_size(w.layout, w.n, w.panels, w.panel_bytes);
}

// Whether a sum is over the channels of one pixel, and each pixel has one.
bool is_pointwise(const Args& args) {
  for (const Axis& a : args.axes) {
    if (a.window != 1 || a.stride != 1 || a.low != 0 || a.out != a.size) return false;
  }
  return true;
}

// Pixels whose sums are their own may be counted along one axis, and cut into lines that are worth
// a block of rows; those of images with one scale are alike, too.
Args in_lines(Args args) {
  if (args.groups > 1 || !is_pointwise(args)) return args;
  int64_t pixels = product_of(args, &Axis::size);
  if (args.x_scale != nullptr && (args.x_dtype == DType::S8 || pixels <= kFewPixels)) {
    pixels *= args.images;
    args.images = 1;
  }
  int64_t line = std::min(pixels, kLinePixels);
  while (line > 1 && pixels % line != 0) --line;
  if (line < args.axes[2].size) line = args.axes[2].size;
  const int64_t sizes[kDims] = {1, line == 0 ? 1 : pixels / line, line};
  for (int i = 0; i < kDims; ++i) args.axes[i].size = args.axes[i].out = sizes[i];
  return args;
}

// What all images have in common.
class Convolver {
 public:
  Convolver(const Args& args, Isa isa)
      : args_(args),
        layout_(args.weights.layout),
        kernels_(kernels_of(isa)),
        // Tests emulate AMX where there may not even be AVX-512, whose table it has.
        table_(table(available(isa) ? isa : selected_isa())),
        depthwise_(is_depthwise(args)),
        pointwise_(args.groups == 1 && is_pointwise(args)),
        is_int8_(args.x_dtype == DType::S8),
        x_bytes_(static_cast<int64_t>(byte_size(args.x_dtype))),
        y_bytes_(static_cast<int64_t>(byte_size(args.y_dtype))),
        multiplies_(table_.multiply != nullptr && isa == Isa::kAvx512 && args.y_dtype == DType::F32 &&
                    args.y_scale != nullptr && args.residual == nullptr),
        x_scale_(args.x_scale == nullptr ? Scale() : Scale::of(*args.x_scale)),
        y_scale_(args.y_scale == nullptr ? Scale() : Scale::of(*args.y_scale)) {
    for (int i = 0; i < kDims; ++i) {
      const Axis& axis = args.axes[i];
      padded_[i] = (axis.out - 1) * axis.stride + (axis.window - 1) * axis.dilation + 1;
    }
    pixel_ = args.channels;
    line_ = padded_[2] * pixel_;
    plane_ = padded_[1] * line_;
    image_ = padded_[0] * plane_;
    of_group_ = args.channels / args.groups;
    const Axis &d = args.axes[0], &h = args.axes[1], &w = args.axes[2];
    // Elements of a line are adjacent, unless there is something between them.
    const bool by_tap = depthwise_ || args.groups > 1 || w.dilation > 1;
    run_rows_ = by_tap ? of_group_ : w.window * of_group_;
    run_k_ = divide_up(run_rows_, 4) * 4;
    const int64_t runs = d.window * h.window * (by_tap ? w.window : 1);
    runs_ = Arena<RunsTag>::get_array<int64_t>(runs);
    run_count_ = 0;
    for (int64_t i = 0; i < d.window; ++i) {
      for (int64_t j = 0; j < h.window; ++j) {
        for (int64_t l = 0; l < (by_tap ? w.window : 1); ++l) {
          runs_[run_count_++] =
              i * d.dilation * plane_ + j * h.dilation * line_ + l * w.dilation * pixel_;
        }
      }
    }
    rows_ = d.out * h.out;
    // Bytes that are all of a sum, and lie as they are multiplied, need no copy.
    in_place_ = is_int8_ && pointwise_ && run_rows_ == run_k_;
    if (depthwise_) unpack();
  }

  // Images [begin, end), one after the other, with the calling thread's memory.
  void run(int64_t begin, int64_t end, const Parallel& pool) {
    const Axis& w = args_.axes[2];
    const int64_t size = product_of(args_, &Axis::size) * args_.channels;
    const Parallel serial;
    const int64_t most = std::max(size, rows_ * w.out * args_.weights.n);
    const Parallel& parallel = most <= kSerialBelow ? serial : pool;
    Memory m;
    if (!depthwise_) {
      const int64_t pixels = image_ / pixel_;
      if (!in_place_) m.copy = Arena<ImageTag>::get_array<int8_t>(image_ + kSlack);
      m.image = m.copy;
      m.pixel_sums = Arena<PixelSumsTag>::get_array<int32_t>(pixels * args_.groups);
      // Those of windows of a pixel are the same.
      m.offsets = pointwise_ ? m.pixel_sums
                             : Arena<OffsetsTag>::get_array<int32_t>(rows_ * args_.groups * w.out);
      m.row_scales = Arena<RowScalesTag>::get_array<float>(w.out);
    }
    for (int64_t i = begin; i < end; ++i) {
      m.index = i;
      find_scale(&m, size, parallel);
      if (depthwise_) {
        convolve_depthwise(m, parallel);
        continue;
      }
      if (in_place_) {
        m.image = reinterpret_cast<const int8_t*>(image_at(i));
        sum_pixels(m, parallel);
      } else {
        quantize(m, parallel);
      }
      std::fill_n(m.row_scales, w.out, m.scale);
      if (!pointwise_) add_up(m, parallel);
      multiply(m, parallel);
    }
  }

 private:
  // An image.
  struct Memory {
    int64_t index = 0;
    float scale = 0;
    bool bounded = false;  // as in `Quantize`
    const int8_t* image = nullptr;   // quantized, with its padding: the copy, or x itself
    int8_t* copy = nullptr;
    int32_t* pixel_sums = nullptr;   // zero point * sum of each group of channels
    int32_t* offsets = nullptr;      // [rows, groups, out]: the same of each window
    float* row_scales = nullptr;
  };

  const uint8_t* image_at(int64_t index) const {
    const int64_t size = product_of(args_, &Axis::size) * args_.channels;
    return static_cast<const uint8_t*>(args_.x) + index * size * x_bytes_;
  }

  void find_scale(Memory* m, int64_t size, const Parallel& parallel) const {
    if (args_.x_scale != nullptr) {
      m->scale = *args_.x_scale;
    } else {
      const int64_t parts = divide_up(size, kSerialBelow);
      auto* most = Arena<PartsTag>::get_array<int32_t>(parts);
      const auto absmax =
          training::table().absmax[static_cast<int>(te::float_of(args_.x_dtype))];
      parallel.ranges(parts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          most[i] = absmax(image_at(m->index) + i * kSerialBelow * x_bytes_,
                           std::min(kSerialBelow, size - i * kSerialBelow), training::Line());
        }
      });
      const int32_t found = parts == 0 ? 0 : *std::max_element(most, most + parts);
      // What XLA makes of a division.
      m->scale = bits_float(static_cast<uint32_t>(found)) * (1.0f / 127.0f);
      m->bounded = found < 0x7f800000;
    }
    if (m->scale < 0x1p-126f) m->scale = 0x1p-126f;
  }

  // Of an axis, the padded elements [first, last) that x has.
  static std::pair<int64_t, int64_t> inside(const Axis& axis, int64_t padded) {
    const int64_t first = std::min(padded, std::max<int64_t>(0, axis.low));
    return {first, std::max(first, std::min(padded, axis.low + axis.size))};
  }

  // What x has of a padded line, or null: pixels from the first that is `inside` on.
  const uint8_t* line_at(const Memory& m, int64_t plane, int64_t index) const {
    const Axis &d = args_.axes[0], &h = args_.axes[1], &w = args_.axes[2];
    const auto [first, last] = inside(w, padded_[2]);
    const int64_t z = plane - d.low, y = index - h.low;
    if (z < 0 || z >= d.size || y < 0 || y >= h.size || first == last) return nullptr;
    const int64_t at = ((z * h.size + y) * w.size + first - w.low) * args_.channels;
    return image_at(m.index) + at * x_bytes_;
  }

  // Quantizes what x has of a padded line, from line_at, to pixels from the first on. Returns whether
  // there is any.
  // `sums`: zero point * sum of each group of channels, or null.
  bool quantize_line(const Memory& m, const uint8_t* x, int8_t* out, int32_t* sums) const {
    const auto [first, last] = inside(args_.axes[2], padded_[2]);
    if (x == nullptr) return false;
    if (is_int8_) {
      std::memcpy(out, x, static_cast<size_t>((last - first) * pixel_));
      if (sums != nullptr) sum_line(out, last - first, sums);
      return true;
    }
    if (args_.x_scale != nullptr) {
      const int64_t pixels = last - first;
      table_.quantize(x, args_.x_dtype, pixels * pixel_, x_scale_, out);
      if (sums != nullptr) sum_line(out, pixels, sums);
      return true;
    }
    Quantize q{};
    q.x = x;
    q.x_dtype = args_.x_dtype;
    q.k = q.padded_k = (last - first) * pixel_;
    q.digits = 1;
    q.out = out;
    q.out_stride = q.k;
    int32_t unused;
    q.segment_k = sums == nullptr ? q.k : of_group_;
    q.zero_point = zero_point();
    q.offsets = sums == nullptr ? &unused : sums;
    float scale;
    q.scale = &scale;
    q.given = &m.scale;
    q.bounded = m.bounded;
    kernels_.quantize(q);
    return true;
  }

  int32_t zero_point() const { return layout_.bits == 8 ? 128 : 8; }

  void sum_line(const int8_t* x, int64_t pixels, int32_t* sums) const {
    table_.sum(x, pixels * args_.groups, of_group_, zero_point(), sums);
  }

  // Of an image that is not copied.
  void sum_pixels(const Memory& m, const Parallel& parallel) const {
    const auto* x = reinterpret_cast<const int8_t*>(image_at(m.index));
    parallel.ranges(image_ / pixel_, divide_up(4 * kSerialBelow, pixel_),
                    [&](int64_t begin, int64_t end) {
                      sum_line(x + begin * pixel_, end - begin, m.pixel_sums + begin);
                    });
  }

  void quantize(const Memory& m, const Parallel& parallel) const {
    const int64_t groups = args_.groups;
    const auto [from, to] = inside(args_.axes[2], padded_[2]);
    const int64_t first = from, last = to;
    const auto line = [&](int64_t index) {
      int8_t* out = m.copy + index * line_;
      int32_t* sums = m.pixel_sums + index * padded_[2] * groups;
      const auto clear = [&](int64_t begin, int64_t end) {
        std::memset(out + begin * pixel_, 0, static_cast<size_t>((end - begin) * pixel_));
        std::fill(sums + begin * groups, sums + end * groups, 0);
      };
      const uint8_t* x = line_at(m, index / padded_[1], index % padded_[1]);
      if (!quantize_line(m, x, out + first * pixel_, sums + first * groups)) {
        return clear(0, padded_[2]);
      }
      clear(0, first);
      clear(last, padded_[2]);
    };
    parallel.ranges(padded_[0] * padded_[1], divide_up(kSerialBelow, line_ + 1),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) line(i);
                    });
    std::memset(m.copy + image_, 0, kSlack);
  }

  // Where the windows of a row of results begin.
  int64_t start_of(int64_t row) const {
    const Axis &d = args_.axes[0], &h = args_.axes[1];
    return row / h.out * d.stride * plane_ + row % h.out * h.stride * line_;
  }

  // What the sums of windows are less by.
  void add_up(const Memory& m, const Parallel& parallel) const {
    const Axis &d = args_.axes[0], &h = args_.axes[1], &w = args_.axes[2];
    const int64_t groups = args_.groups;
    const int64_t steps = w.out * groups * d.window * h.window * w.window;
    parallel.ranges(rows_, divide_up(kSerialBelow, steps + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int32_t* out = m.offsets + row * groups * w.out;
        std::fill_n(out, groups * w.out, 0);
        const int32_t* start = m.pixel_sums + start_of(row) / pixel_ * groups;
        for (int64_t i = 0; i < d.window; ++i) {
          for (int64_t j = 0; j < h.window; ++j) {
            for (int64_t l = 0; l < w.window; ++l) {
              const int64_t tap =
                  (i * d.dilation * plane_ + j * h.dilation * line_) / pixel_ + l * w.dilation;
              const int32_t* sums = start + tap * groups;
              for (int64_t g = 0; g < groups; ++g) {
                for (int64_t x = 0; x < w.out; ++x) {
                  out[g * w.out + x] += sums[x * w.stride * groups + g];
                }
              }
            }
          }
        }
      }
    });
  }

  Output output_of(int64_t image, int64_t row, int64_t column, int64_t columns) const {
    const int64_t out = args_.axes[2].out, n = args_.weights.n;
    const int64_t at = ((image * rows_ + row) * out * n + column) * y_bytes_;
    const auto from = [](const void* numbers, int64_t bytes) {
      return numbers == nullptr ? nullptr : static_cast<const uint8_t*>(numbers) + bytes;
    };
    return {static_cast<uint8_t*>(args_.y) + at, args_.y_dtype, n * y_bytes_, columns,
            from(args_.bias, column * y_bytes_), from(args_.residual, at),
            args_.clamps, args_.least, args_.most};
  }

  // Rows are shared out, or first panels where they are larger than the image: what all tasks read
  // is the smaller of both. A task reads a few panels for all of its rows.
  void multiply(const Memory& m, const Parallel& parallel) {
    const int64_t panels = args_.weights.panels, wide = layout_.columns() / kPanelColumns;
    const int64_t block = std::max<int64_t>(1, kernels_.block_panels / wide);
    const int64_t per_group = args_.weights.n / args_.groups / layout_.columns();
    const int64_t steps =
        std::max<int64_t>(1, args_.axes[2].out * run_k_ / 4 * run_count_ * panels * wide);
    const int64_t all = divide_up(steps * rows_, kernels_.task_steps);
    const int64_t wanted =
        parallel.threads() == 1 ? 1 : std::min<int64_t>(4 * parallel.threads(), all);
    const bool by_panels = panels * args_.weights.panel_bytes > image_;
    const int64_t most = by_panels ? divide_up(panels, block) : rows_;
    const int64_t first = std::min(wanted, most), second = divide_up(wanted, first);
    const int64_t task_rows = divide_up(rows_, by_panels ? second : first);
    const int64_t row_tasks = divide_up(rows_, task_rows);
    const int64_t task_panels =
        divide_up(divide_up(panels, by_panels ? first : second), block) * block;
    const int64_t panel_tasks = divide_up(panels, task_panels);
    std::atomic<uint64_t> key{0};
    parallel.run(row_tasks * panel_tasks, [&](int64_t task) {
      const int64_t r = task / panel_tasks * task_rows, p = task % panel_tasks * task_panels;
      const int64_t end = std::min(panels, p + task_panels);
      const Release release{kernels_.release};
      uint64_t keys = 0;
      for (int64_t i = p; i < end;) {
        int64_t count = std::min(block, end - i);
        if (args_.groups > 1) count = std::min(count, per_group - i % per_group);
        if (r == 0) keys += check_headers(args_.weights, i, count);
        multiply_block(m, r, std::min(rows_, r + task_rows), i, count);
        i += count;
      }
      key.fetch_add(keys, std::memory_order_relaxed);
    });
    if (!checked_) check_payloads(panel_at(args_.weights, 0), layout_, 0, panels, key, parallel);
    checked_ = true;
  }

  void multiply_block(const Memory& m, int64_t begin, int64_t end, int64_t panel,
                      int64_t count) const {
    const Axis& w = args_.axes[2];
    const int64_t panels = count * layout_.columns() / kPanelColumns;
    const int64_t column = panel * layout_.columns();
    const int64_t columns = std::min(args_.weights.n - column, panels * kPanelColumns);
    const int64_t group = args_.groups == 1 ? 0 : column / (args_.weights.n / args_.groups);
    Tile t{};
    t.x_stride = w.stride * pixel_;
    t.rows = w.out;
    t.offsets_stride = 1;
    t.panels = panels;
    t.k = run_k_;
    t.runs = run_count_;
    t.x_runs = runs_;
    t.first = true;
    read_panels(panel, count, &t);
    Epilogue f{};
    f.rows = t.rows;
    f.digits = 1;
    f.row_scales = m.row_scales;
    f.scales = t.scales;
    f.scales_stride = t.scales_stride;
    t.epilogue = &f;
    const bool is_signed = layout_.bits == 4 && kernels_.expands_signed;
    for (int64_t row = begin; row < end; ++row) {
      t.x = m.image + start_of(row) + group * of_group_;
      t.offsets = is_signed ? nullptr : m.offsets + (row * args_.groups + group) * w.out;
      f.out = output_of(m.index, row, column, columns);
      args_.y_scale == nullptr ? kernels_.exact8(t) : multiply_and_round(m, row, column, t, f.out);
    }
  }

  // A row of results as int8, some pixels after the others: their sums stay in the first cache.
  void multiply_and_round(const Memory& m, int64_t row, int64_t column, Tile t,
                          const Output& out) const {
    t.epilogue = nullptr;
    if (multiplies_) {
      Results to = results_of(m, row, column, out);
      to.scales = t.scales;
      to.scales_stride = t.scales_stride;
      return table_.multiply(t, to);
    }
    t.sums_stride = 16 * t.panels;
    t.sums = Arena<SumsTag>::get_array<int32_t>(kRoundedRows * t.sums_stride);
    Finished f{t.sums, t.sums_stride, results_of(m, row, column, out)};
    f.to.scales = t.scales;
    f.to.scales_stride = t.scales_stride;
    for (int64_t pixel = 0, all = t.rows; pixel < all; pixel += kRoundedRows) {
      t.rows = f.to.pixels = std::min(kRoundedRows, all - pixel);
      kernels_.exact8(t);
      table_.finish(f);
      t.x += t.rows * t.x_stride;
      if (t.offsets != nullptr) t.offsets += t.rows;
      if (f.to.out.residual != nullptr) f.to.out.residual += t.rows * out.stride;
      f.to.qvalues += t.rows * f.to.n;
    }
  }

  // Where a row of sums goes, but for the scales.
  Results results_of(const Memory& m, int64_t row, int64_t column, const Output& out) const {
    Results to{};
    to.pixels = args_.axes[2].out;
    to.n = args_.weights.n;
    to.x_scale = m.scale;
    to.out = out;
    if (args_.y_scale != nullptr) to.qvalues = qvalues_at(m.index, row) + column;
    to.y_scale = y_scale_;
    return to;
  }

  // Where a row of results goes as int8.
  int8_t* qvalues_at(int64_t image, int64_t row) const {
    const int64_t pixels = (image * rows_ + row) * args_.axes[2].out;
    return static_cast<int8_t*>(args_.y) + pixels * args_.weights.n;
  }

  // Quantized values and scales of panels, as `exact8` reads them.
  void read_panels(int64_t panel, int64_t count, Tile* t) const {
    const uint8_t* first = panel_at(args_.weights, panel);
    t->qvalues = first + layout_.qvalues_offset();
    t->qvalues_stride = args_.weights.panel_bytes;
    t->scales = first + kPanelHeader;
    t->scales_stride = args_.weights.panel_bytes;
    if (layout_.bits == 4) {
      const int64_t bytes = 16 * layout_.padded_k();
      auto* values = Arena<ExpandedTag>::get_array<uint8_t>(t->panels * bytes);
      auto* scales = Arena<ExpandedScalesTag>::get_array<float>(t->panels * 16);
      for (int64_t i = 0; i < count; ++i) {
        kernels_.expand_panel({first + i * args_.weights.panel_bytes, &layout_,
                               values + i * 2 * bytes, scales + i * 32});
      }
      t->qvalues = values;
      t->qvalues_stride = bytes;
      t->scales = reinterpret_cast<const uint8_t*>(scales);
      t->scales_stride = 64;
    }
    if (run_rows_ == run_k_) return;
    // Runs begin within a line of four rows: copied, with zeros after each. These bytes are not
    // quantized values, but add nothing to sums, whatever x has there; where the zero point is taken
    // from them first, they are this.
    const int none = kernels_.signed_sums && layout_.bits == 8 ? zero_point() : 0;
    const int64_t bytes = 16 * run_k_ * run_count_;
    auto* values = Arena<WeightsTag>::get_array<uint8_t>(t->panels * bytes);
    std::memset(values, none, static_cast<size_t>(t->panels * bytes));
    for (int64_t p = 0; p < t->panels; ++p) {
      const uint8_t* from = t->qvalues + p * t->qvalues_stride;
      uint8_t* to = values + p * bytes;
      for (int64_t row = 0; row < layout_.k; ++row) {
        const int64_t place = row / run_rows_ * run_k_ + row % run_rows_;
        for (int64_t c = 0; c < 16; ++c) {
          to[place / 4 * 64 + 4 * c + place % 4] = from[row / 4 * 64 + 4 * c + row % 4];
        }
      }
    }
    t->qvalues = values;
    t->qvalues_stride = bytes;
  }

  // Words of a line of a depthwise convolution's window, and of all lines.
  int64_t words_of_line() const { return divide_up(args_.axes[2].window, table_.taps); }
  int64_t words() const {
    return args_.axes[0].window * args_.axes[1].window * words_of_line();
  }

  // The weight of a depthwise convolution, as words.
  void unpack() {
    const PackedWeights& w = args_.weights;
    uint64_t key = check_headers(w, 0, w.panels);
    check_payloads(panel_at(w, 0), layout_, 0, w.panels, key, Parallel());
    auto* weights = Arena<WeightsTag>::get_array<uint32_t>(words() * w.n);
    auto* starts = Arena<StartsTag>::get_array<int32_t>(w.n);
    float* scales = Arena<ScalesTag>::get_array<float>(w.n);
    std::fill_n(starts, w.n, 0);
    const int64_t window = args_.axes[2].window;
    for (int64_t p = 0; p < w.panels; ++p) {
      const uint8_t* panel = panel_at(w, p);
      const int64_t column = p * layout_.columns();
      const int columns = panel_columns(w.n, p, layout_.columns());
      for (int c = 0; c < columns; ++c) {
        scales[column + c] = panel_scale(panel, layout_, 0, c);
      }
      Unpack u{};
      u.mask = layout_.bits == 8 ? 255 : 15;
      u.zero_point = zero_point();
      u.columns = columns;
      u.starts = starts + column;
      for (int64_t tap = 0; tap < run_count_; ++tap) {
        const int64_t word = tap / window * words_of_line() + tap % window / table_.taps;
        u.line = panel + layout_.qvalues_at(tap);
        u.shift = static_cast<int>(8 * (tap % 4)) + (layout_.high(tap) ? 4 : 0);
        u.place = static_cast<int>(tap % window % table_.taps);
        u.words = weights + word * w.n + column;
        table_.unpack(u);
      }
    }
    weights_ = weights;
    starts_ = starts;
    scales_ = scales;
  }

  // Each task holds the lines that a row of results reads, in its first cache if it can: of int8 it
  // takes some of the channels after the others, and reads each line once for all of its rows.
  void convolve_depthwise(const Memory& m, const Parallel& parallel) const {
    const Axis &d = args_.axes[0], &h = args_.axes[1], &w = args_.axes[2];
    // Lines of a plane, and planes, that windows reach.
    const int64_t lines = (h.window - 1) * h.dilation + 1, planes = (d.window - 1) * d.dilation + 1;
    DepthwisePart part{};
    part.lines = lines;
    part.planes = planes;
    // Words that no window begins with are left out.
    part.step = w.dilation == 1 && table_.taps % w.stride == 0 ? w.stride : 1;
    part.line = divide_up(padded_[2], part.step);
    const int64_t blocks = divide_up(args_.channels, table_.lanes);
    const int64_t held = planes * lines * part.line * table_.lanes * 4;
    // As many blocks at once as are a line of the cache in int8, or several of them. Threads share
    // out channels, and only then rows: neighbours of rows would each read the lines between them.
    const int64_t whole = 64 / table_.lanes, threads = parallel.threads();
    const int64_t fits = std::max<int64_t>(1, kHeldBytes / held / whole) * whole;
    const int64_t share = threads == 1 ? blocks : divide_up(blocks, 4 * threads * whole) * whole;
    part.blocks = is_int8_ ? std::min({blocks, fits, share}) : blocks;
    const int64_t parts = divide_up(blocks, part.blocks);
    const int64_t steps = w.out * part.blocks * table_.lanes * (words() + 8);
    const int64_t grain = divide_up(4 * kSerialBelow, steps + 1);
    const int64_t wanted = threads == 1 || parts >= 2 * threads ? 1 : divide_up(4 * threads, parts);
    const int64_t ranges = std::max<int64_t>(1, std::min(wanted, rows_ / grain));
    const int64_t size = divide_up(rows_, ranges);
    parallel.run(divide_up(rows_, size) * parts, [&](int64_t task) {
      DepthwisePart one = part;
      one.first = task % parts * part.blocks * table_.lanes;
      one.channels = std::min(args_.channels - one.first, part.blocks * table_.lanes);
      const int64_t begin = task / parts * size;
      convolve_rows(m, one, begin, std::min(rows_, begin + size));
    });
  }

  // Channels of a depthwise convolution, and how lines of them are held.
  struct DepthwisePart {
    int64_t first, channels;
    int64_t blocks;         // of as many channels as a vector has numbers
    int64_t planes, lines;  // held
    int64_t line;           // words of a block of one
    int64_t step;           // pixels from word to word
  };

  void convolve_rows(const Memory& m, const DepthwisePart& part, int64_t begin, int64_t end) const {
    const Axis &d = args_.axes[0], &h = args_.axes[1], &w = args_.axes[2];
    const int64_t count = part.planes * part.lines, size = part.blocks * part.line * table_.lanes;
    auto* held = Arena<LinesTag>::get_array<uint32_t>(count * size);
    // What is in the place of each line.
    int64_t* places = Arena<PlacesTag>::get_array<int64_t>(count + words());
    int64_t* taps = places + count;
    std::fill_n(places, count, -1);
    const auto [inside_first, inside_last] = inside(w, padded_[2]);
    const int64_t inside_w = inside_last - inside_first;
    const int64_t apart = table_.taps * w.dilation / part.step;  // words of a window's line
    int8_t* qvalues = nullptr;
    if (!is_int8_) {
      qvalues = Arena<LineTag>::get_array<int8_t>(std::max<int64_t>(1, inside_w * pixel_));
    }
    Spread s{};
    s.stride = pixel_;
    s.channels = part.channels;
    s.first = inside_first;
    s.dilation = w.dilation;
    s.pixels = part.line;
    s.step = part.step;
    const auto hold = [&](int64_t plane, int64_t index, uint32_t* to) {
      const uint8_t* x = line_at(m, plane, index);
      s.x = is_int8_ ? reinterpret_cast<const int8_t*>(x) + part.first : qvalues;
      if (!is_int8_) quantize_line(m, x, qvalues, nullptr);
      s.inside = x == nullptr ? 0 : inside_w;
      s.line = to;
      table_.spread(s);
    };
    Depthwise one{};
    one.x = held;
    one.line = part.line;
    one.stride = w.stride / part.step;
    one.taps = taps;
    one.tap_count = words();
    one.weights = weights_ + part.first;
    one.starts = starts_ + part.first;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t z = row / h.out * d.stride, y = row % h.out * h.stride;
      // The next plane and line take the place of the first, which no window reaches any more.
      const int64_t turn_z = z % part.planes, turn_y = y % part.lines;
      int64_t tap = 0;
      for (int64_t i = 0; i < d.window; ++i) {
        for (int64_t j = 0; j < h.window; ++j) {
          const int64_t plane = z + i * d.dilation, at = y + j * h.dilation;
          const int64_t p = turn_z + i * d.dilation, l = turn_y + j * h.dilation;
          const int64_t place = (p < part.planes ? p : p - part.planes) * part.lines +
                                (l < part.lines ? l : l - part.lines);
          const int64_t index = plane * padded_[1] + at;
          if (places[place] != index) hold(plane, at, held + place * size);
          places[place] = index;
          for (int64_t word = 0; word < words_of_line(); ++word) {
            taps[tap++] = place * part.blocks * part.line + word * apart;
          }
        }
      }
      const Output out = output_of(m.index, row, part.first, part.channels);
      one.to = results_of(m, row, part.first, out);
      one.to.scales = reinterpret_cast<const uint8_t*>(scales_ + part.first);
      one.to.scales_stride = 64;
      table_.depthwise(one);
    }
  }

  const Args args_;
  const PanelLayout layout_;
  const Kernels& kernels_;
  const Table& table_;
  const bool depthwise_;
  const bool pointwise_;  // sums are over the channels of a pixel
  const bool is_int8_;    // x
  const int64_t x_bytes_, y_bytes_;
  const bool multiplies_;  // by the kernel whose sums become int8 in registers
  const Scale x_scale_, y_scale_;  // that are given
  bool in_place_;  // x is multiplied where it lies
  int64_t padded_[kDims];  // elements that windows reach
  int64_t pixel_, line_, plane_, image_;  // bytes of an image's parts
  int64_t of_group_;       // channels
  int64_t rows_;           // lines of results of an image
  // Ranges of the weight's rows, and of bytes of an image, whose products are summed.
  int64_t run_rows_, run_k_, run_count_;
  int64_t* runs_;
  // Of depthwise convolutions.
  const uint32_t* weights_ = nullptr;
  const int32_t* starts_ = nullptr;
  const float* scales_ = nullptr;
  bool checked_ = false;
};

}  // namespace

bool has_kernel(int64_t channels, int64_t n, int64_t groups, const PanelLayout& layout) {
  if (groups == 1 || (groups == channels && groups == n)) return true;
  return n / groups % layout.columns() == 0;
}

void convolve(const Args& args, const Parallel& parallel, Isa isa) {
  check(args);
  if (args.images * product_of(args, &Axis::out) == 0) return;
  const Args lined = in_lines(args);
  const int64_t threads = parallel.threads();
  Convolver all(lined, isa);
  if (threads == 1 || lined.images < 2 * threads) {
    all.run(0, lined.images, parallel);
    return;
  }
  // Images stay in the caches of the thread that quantizes and then convolves them. What is the same
  // for all of them is in this thread's memory, and only read.
  parallel.run(lined.images, [&](int64_t i) { Convolver(all).run(i, i + 1, Parallel()); });
}

}  // namespace jaxtap::convolution

JAXTAP_DEFINE_TABLES(convolution, avx512, neon_dot)
