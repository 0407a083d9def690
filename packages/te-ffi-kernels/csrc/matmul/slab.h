// A matmul of a slab of rows with a packed weight: how rows are quantized, and how panels and rows
// are shared out in tasks and given to the kernels of an instruction set.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "common/arena.h"
#include "matmul/checks.h"
#include "matmul/kernels.h"
#include "matmul/matmul.h"
#include "matmul/output.h"

namespace jaxtap {

constexpr int64_t kLongSegment = int64_t{1} << 16;
// Numbers of a row with a scale of their own, where it has two digits and the weight no groups: an
// outlier costs its neighbours their last bits.
constexpr int64_t kPairSegment = 256;
// Largest magnitude of a number in two digits.
constexpr int64_t kPairLimit = 127 * (1 + 256);
// Digit rows per task where there are many: a multiple of all block sizes and numbers of digits.
constexpr int64_t kTaskRows = 192;
// Bytes of digit rows that are held at once.
constexpr int64_t kSlabBytes = int64_t{16} << 20;

struct RotatedTag {};
struct DigitsTag {};
struct OffsetsTag {};
struct ScalesTag {};
struct GroupScalesTag {};
struct SumsTag {};
struct QValuesTag {};
struct PanelScalesTag {};

// A matmul of one slab of rows: what all tasks need to know.
class SlabMatmul {
 public:
  SlabMatmul(const Matmul& args, int digits, const Kernels& kernels)
      : args_(args), layout_(args.weights.layout), digits_(digits), kernels_(kernels) {
    const PanelLayout& layout = layout_;
    streamed_ = layout.bits == 4 && args.m * digits <= kStreamRows;
    parts_ = streamed_ || layout.bits == 8 ? 1 : layout.table().parts;
    k_ = layout.padded_k();
    two_digits_ = digits == 2;
    exact_ = layout.group == 0 && k_ <= kExactK && !two_digits_;
    const int64_t segment = two_digits_ ? kPairSegment : exact_ ? k_ : kLongSegment;
    segment_k_ = layout.group == 0 ? segment : layout.group;
    segments_ = (k_ + segment_k_ - 1) / segment_k_;
    grouped_x_ = two_digits_ || (digits == 1 && layout.group != 0);
    const int64_t most_qtype = layout.bits == 8 ? 128 : layout.table().most;
    fits_int32_ = kPairLimit * most_qtype * segment_k_ <= INT32_MAX;
    int16_digits_ = two_digits_ && fits_int32_ && layout.bits == 4 && !streamed_ &&
                    kernels.two_digits16 != nullptr;
    // Rows a power of two apart would share cache sets.
    stride_ = parts_ * k_ + 64;
    const auto block = static_cast<double>(std::max<int64_t>(1, args.rotation.block));
    factor_ = static_cast<float>(1 / std::sqrt(block));
    segments_stride_ = parts_ * segments_ + 16;
  }

  void run(int64_t begin, int64_t end, const Parallel& parallel) {
    begin_ = begin;
    rows_ = end - begin;
    const int64_t digit_rows = rows_ * digits_;
    digits_of_x_ = Arena<DigitsTag>::get_array<int8_t>(digit_rows * stride_);
    offsets_ = Arena<OffsetsTag>::get_array<int32_t>(digit_rows * segments_stride_);
    row_scales_ = Arena<ScalesTag>::get_array<float>(rows_);
    if (grouped_x_) {
      group_scales_ = Arena<GroupScalesTag>::get_array<float>(rows_ * segments_stride_);
    }
    const int64_t few = std::max<int64_t>(1, (int64_t{1} << 15) / k_);
    parallel.ranges(rows_, few, [&](int64_t from, int64_t to) {
      for (int64_t r = from; r < to; ++r) {
        quantize(r);
        if (parts_ == 2) repeat_groups(r);
      }
    });
    multiply(digit_rows, parallel);
  }

 private:
  void quantize(int64_t row) {
    Quantize q{};
    q.x = static_cast<const uint8_t*>(args_.x) +
          (begin_ + row) * layout_.k * static_cast<int64_t>(byte_size(args_.x_dtype));
    q.x_dtype = args_.x_dtype;
    if (args_.rotation.block != 0) rotate(&q);
    q.k = layout_.k;
    q.padded_k = k_;
    q.digits = digits_;
    q.segment_k = segment_k_;
    q.zero_point = layout_.bits == 8 ? 128 : layout_.table().zero_point;
    q.int16_digits = int16_digits_;
    q.out = digits_of_x_ + row * digits_ * stride_;
    q.out_stride = stride_;
    q.offsets = offsets_ + row * digits_ * segments_stride_;
    q.offsets_stride = segments_stride_;
    q.scale = row_scales_ + row;
    q.given = args_.x_scale;
    if (!grouped_x_) return kernels_.quantize(q);
    // What is left to multiply rows with is 1.
    *q.scale = 1.0f;
    if (two_digits_) {
      q.scale = group_scales_ + row * segments_stride_;
      return kernels_.quantize_pairs(q);
    }
    // Each group as a row of its own.
    q.k = q.padded_k = layout_.group;
    for (int64_t i = 0; i < segments_; ++i) {
      q.scale = group_scales_ + row * segments_stride_ + i;
      kernels_.quantize(q);
      q.x += layout_.group * static_cast<int64_t>(byte_size(q.x_dtype));
      q.out += layout_.group;
      ++q.offsets;
    }
  }

  // Has each group of a row twice: for the high and the low part of the numbers of a table.
  void repeat_groups(int64_t row) {
    const auto repeat = [&](auto* begin, int64_t size) {
      const size_t bytes = static_cast<size_t>(size) * sizeof(*begin);
      for (int64_t i = segments_ - 1; i >= 0; --i) {  // from the last on: none is overwritten
        std::memmove(begin + (2 * i + 1) * size, begin + i * size, bytes);
        std::memmove(begin + 2 * i * size, begin + i * size, bytes);
      }
    };
    for (int64_t p = row * digits_; p < (row + 1) * digits_; ++p) {
      repeat(offsets_ + p * segments_stride_, 1);
      if (!int16_digits_) repeat(digits_of_x_ + p * stride_, segment_k_);
    }
    if (int16_digits_) repeat(digits_of_x_ + row * digits_ * stride_, 2 * segment_k_);
    if (grouped_x_) repeat(group_scales_ + row * segments_stride_, 1);
  }

  // Has the row that is quantized rotated first.
  void rotate(Quantize* q) {
    float* out = Arena<RotatedTag>::get_array<float>((layout_.k + 15) / 16 * 16);
    const Rotation& rotation = args_.rotation;
    kernels_.rotate({q->x, q->x_dtype, layout_.k, rotation.signs, rotation.block, factor_, out});
    q->x = reinterpret_cast<const uint8_t*>(out);
    q->x_dtype = DType::F32;
  }

  // Splits the panels, and the rows too where there are many.
  void multiply(int64_t digit_rows, const Parallel& parallel) {
    const int64_t panels = args_.weights.panels, wide = layout_.columns() / kPanelColumns;
    const int64_t task_rows = digit_rows <= 2 * kTaskRows ? digit_rows : kTaskRows;
    const int64_t row_tasks = (digit_rows + task_rows - 1) / task_rows;
    // Reading a panel from memory takes as long as multiplying 8 rows.
    const int64_t steps = std::max<int64_t>(task_rows, 8) * (k_ / 4) * wide;
    int64_t task_panels = (kernels_.task_steps + steps - 1) / steps;
    if (parallel.threads() == 1) task_panels = panels;
    const int64_t wanted = std::max<int64_t>(1, 16 * parallel.threads() / row_tasks);
    task_panels = std::max(task_panels, (panels + wanted - 1) / wanted);
    const int64_t block = std::max<int64_t>(1, kernels_.block_panels / wide);
    task_panels = (task_panels + block - 1) / block * block;
    const int64_t panel_tasks = (panels + task_panels - 1) / task_panels;
    std::atomic<uint64_t> key{0};
    parallel.run(row_tasks * panel_tasks, [&](int64_t task) {
      const int64_t r = task / panel_tasks * task_rows, p = task % panel_tasks * task_panels;
      const int64_t rows = std::min(digit_rows - r, task_rows);
      const int64_t end = std::min(panels, p + task_panels);
      const Release release{kernels_.release};
      uint64_t keys = 0;
      for (int64_t i = p; i < end; i += block) {
        const int64_t count = std::min(block, end - i);
        // Each header once, where its panel is about to be read.
        if (begin_ == 0 && r == 0) keys += check_headers(args_.weights, i, count);
        if (streamed_) {
          multiply_stream(i, count);
        } else {
          multiply_block(r, rows, i, count);
        }
      }
      key.fetch_add(keys, std::memory_order_relaxed);
    });
    // What was made of quantized values that turn out to be damaged is not returned.
    if (begin_ == 0) {
      check_payloads(panel_at(0), layout_, 0, panels, key.load(), parallel);
    }
  }

  const uint8_t* panel_at(int64_t index) const {
    return jaxtap::panel_at(args_.weights, index);
  }

  void multiply_stream(int64_t panel, int64_t count) {
    const int64_t columns = layout_.columns();
    Stream s;
    s.x = digits_of_x_;
    s.x_stride = stride_;
    s.rows = rows_;
    s.digits = digits_;
    s.offsets = offsets_;
    s.offsets_stride = segments_stride_;
    // Quantized values of x are rescaled before the scales of the weight, digits after.
    s.x_scales = grouped_x_ ? group_scales_ : digits_ == 1 ? row_scales_ : nullptr;
    s.x_scales_stride = grouped_x_ ? segments_stride_ : 1;
    s.x_scales_step = grouped_x_ ? 1 : 0;
    s.row_scales = digits_ == 3 ? row_scales_ : nullptr;
    s.fits_int32 = fits_int32_;
    s.layout = &layout_;
    s.grouped = layout_.group != 0;
    s.k = k_;
    s.segment_k = segment_k_;
    for (int64_t i = panel; i < panel + count; ++i) {
      s.panel = panel_at(i);
      s.out = output_of(args_, begin_, i * columns, panel_columns(args_.weights.n, i, columns));
      kernels_.stream(s);
    }
  }

  // `count` panels, which are twice as many of 16 columns in 4 bits.
  void multiply_block(int64_t r, int64_t rows, int64_t panel, int64_t count) {
    const int64_t panels = count * layout_.columns() / kPanelColumns;
    const int64_t panel_bytes = args_.weights.panel_bytes;
    const uint8_t* first = panel_at(panel);
    Tile t{};
    t.x = digits_of_x_ + r * stride_;
    t.x_stride = stride_;
    t.rows = rows;
    t.offsets = offsets_ + r * segments_stride_;
    t.offsets_stride = segments_stride_;
    t.qvalues = first + layout_.qvalues_offset();
    t.qvalues_stride = panel_bytes;
    t.panels = panels;
    t.sums_stride = 16 * std::max(panels, kernels_.block_panels);
    t.sums = Arena<SumsTag>::get_array<int32_t>(rows * t.sums_stride);
    t.k = parts_ * k_;
    t.segment_k = segment_k_;
    t.scales = first + kPanelHeader;
    t.scales_stride = panel_bytes;
    t.scales_step = layout_.group == 0 ? 0 : 64;
    t.fits_int32 = fits_int32_;
    if (grouped_x_) t.x_scales = group_scales_ + r / digits_ * segments_stride_;
    t.totals = reinterpret_cast<float*>(t.sums);
    if (layout_.bits == 4) {
      const int64_t bytes = (int16_digits_ ? 32 : 16) * t.k;  // of a panel
      uint8_t* qvalues = Arena<QValuesTag>::get_array<uint8_t>(panels * bytes);
      const auto expand = int16_digits_ ? kernels_.expand_panel16 : kernels_.expand_panel;
      const int64_t groups = parts_ * layout_.scales();
      float* scales = Arena<PanelScalesTag>::get_array<float>(panels * 16 * groups);
      for (int64_t i = 0; i < count; ++i) {
        expand({first + i * panel_bytes, &layout_, qvalues + i * 2 * bytes,
                scales + i * 32 * groups});
      }
      t.scales = reinterpret_cast<const uint8_t*>(scales);
      t.scales_stride = 64 * groups;
      t.qvalues = qvalues;
      t.qvalues_stride = bytes;
      if (kernels_.expands_signed) t.offsets = nullptr;
    }
    const Epilogue f = epilogue_of(t, r / digits_, rows / digits_, panel);
    if (int16_digits_) {
      t.rows /= 2;
      t.x_stride *= 2;
      kernels_.two_digits16(t);
    } else if (two_digits_) {
      kernels_.two_digits8(t);
    } else if (!exact_) {
      kernels_.scaled8(t);
    } else {
      return multiply_exactly(kernels_, t, k_, f);
    }
    kernels_.epilogue(f);
  }

  // From sums to rows of y.
  Epilogue epilogue_of(const Tile& t, int64_t row, int64_t rows, int64_t panel) const {
    const int64_t column = panel * layout_.columns();
    const int64_t columns = std::min(args_.weights.n - column, t.panels * kPanelColumns);
    Epilogue f;
    f.sums = exact_ ? t.sums : nullptr;
    f.totals = t.totals;
    f.stride = t.sums_stride;
    f.rows = rows;
    f.digits = two_digits_ ? 1 : digits_;  // put together
    f.row_scales = row_scales_ + row;
    f.scales = exact_ ? t.scales : nullptr;  // else they are in the totals
    f.scales_stride = t.scales_stride;
    f.out = output_of(args_, begin_ + row, column, columns);
    return f;
  }

  const Matmul& args_;
  const PanelLayout layout_;
  const int digits_;
  const Kernels& kernels_;
  // `parts_` times as many rows of K and segments are multiplied.
  int64_t k_, segment_k_, segments_, segments_stride_, stride_, parts_;
  float factor_;  // of rotated rows
  bool exact_;
  bool streamed_;      // few rows of a weight of 4 bits
  bool two_digits_;    // with a scale for each segment of a row
  bool int16_digits_;  // the two digits lie as one of int16
  bool fits_int32_;    // sums of both digits of a segment do
  bool grouped_x_;     // a scale for each segment of a row
  int64_t begin_ = 0, rows_ = 0;
  int8_t* digits_of_x_ = nullptr;
  int32_t* offsets_ = nullptr;
  float* row_scales_ = nullptr;
  float* group_scales_ = nullptr;
};

}  // namespace jaxtap
