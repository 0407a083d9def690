#include "matmul/floats.h"

#include <algorithm>
#include <atomic>

#include "common/arena.h"
#include "matmul/checks.h"
#include "matmul/output.h"

namespace jaxtap {
namespace {

constexpr int64_t kNever = INT64_MAX;  // of rows
// Rows of K in a group up to which rescaling takes a good part of an integer matmul.
constexpr int64_t kOftenRescaled = 64;

// Rows from which dequantizing the weight pays. Fewer take the time of reading it, and it is
// smaller as it lies. Without groups integer matmuls have little to rescale.
int64_t least_rows_amx(const PanelLayout& layout) {
  return layout.bits == 4 ? 16 : layout.group != 0 ? 64 : kManyRows;
}

// The same with AVX512-BF16, which multiplies as many pairs of bfloat16 as of int16: what pays is that
// nothing is rescaled, and that tables of two parts are multiplied once. Else integers are as fast, and
// equal on all instruction sets.
int64_t least_rows_avx512(const PanelLayout& layout) {
  const bool rescales = layout.bits == 4 && layout.group != 0 && layout.group <= kOftenRescaled;
  return rescales || layout.table().parts == 2 ? 16 : kNever;
}

// The same on AMX where x is rounded to int8 by groups.
constexpr int64_t kLeastRounded = 64;

// Rows of x that are multiplied with all weights of a task before the next ones are, by blocks of
// steps of K: with its sums and a few columns, such a block of x stays in the second cache.
constexpr int64_t kChunkRows = 256;
constexpr int64_t kBlockSteps = 8;
// Bytes of x that are held at once, and of the weights of a task.
constexpr int64_t kSlabBytes = int64_t{16} << 20;
constexpr int64_t kWeightBytes = int64_t{1} << 20;
// Columns that are multiplied at once.
constexpr int64_t kWide = 32;
// Work that is worth a task, about 10 microseconds, in numbers of a weight times what each takes:
// as long to dequantize as to multiply with kDequantizeRows rows.
constexpr int64_t kTaskWork = int64_t{1} << 23;
constexpr int64_t kDequantizeRows = 64;

struct RoundedTag {};
struct QValuesTag {};
struct RowsTag {};
struct WeightsTag {};
struct RestsTag {};
struct FloatSumsTag {};

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

class FloatMatmul {
 public:
  FloatMatmul(const Matmul& args, const Parallel& parallel, const FloatKernels& kernels)
      : args_(args),
        layout_(args.weights.layout),
        parallel_(parallel),
        kernels_(kernels),
        steps_(blocks_of(layout_.k, kStep)),
        wide_(blocks_of(args.weights.n, kWide)) {}

  void run() {
    const int64_t row_bytes = 2 * steps_ * kStep;
    const int64_t slab = std::max<int64_t>(1, kSlabBytes / row_bytes / kChunkRows) * kChunkRows;
    for (begin_ = 0; begin_ < args_.m; begin_ += slab) {
      rows_ = std::min(slab, args_.m - begin_);
      x_ = Arena<RowsTag>::get_array<uint16_t>(blocks_of(rows_, kRowTile) * kRowTile * row_bytes / 2);
      from_ = static_cast<const uint8_t*>(args_.x) + begin_ * 2 * layout_.k;
      if (args_.digits == 1) round_rows();
      arrange_all_rows();
      multiply();
    }
  }

 private:
  int64_t steps_at(int64_t step) const { return std::min(kBlockSteps, steps_ - step); }
  int64_t rows_at(int64_t row) const { return std::min(kChunkRows, rows_ - row); }

  // The rows of x from a row on, a multiple of kChunkRows, in the steps from a step on, a multiple
  // of kBlockSteps.
  uint16_t* rows_from(int64_t row, int64_t step) const {
    const int64_t tiles = blocks_of(rows_at(row), kRowTile);
    return x_ + (row / kRowTile * steps_ + tiles * step) * kTileNumbers;
  }

  void round_rows() {
    auto* out = Arena<RoundedTag>::get_array<uint16_t>(rows_ * layout_.k);
    const int64_t few = std::max<int64_t>(1, (int64_t{1} << 15) / layout_.k);
    parallel_.ranges(rows_, few, [&](int64_t from, int64_t to) {
      RoundRow r;
      r.k = layout_.k;
      r.group = layout_.group;
      r.qvalues = Arena<QValuesTag>::get_array<int8_t>(layout_.group);
      for (int64_t row = from; row < to; ++row) {
        r.x = from_ + row * 2 * layout_.k;
        r.out = out + row * layout_.k;
        kernels_.round_row(r);
      }
    });
    from_ = reinterpret_cast<const uint8_t*>(out);
  }

  void arrange_all_rows() {
    const int64_t steps = blocks_of(steps_, kBlockSteps);
    parallel_.ranges(blocks_of(rows_, kChunkRows) * steps, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t row = i / steps * kChunkRows, step = i % steps * kBlockSteps;
        ArrangeRows t;
        t.x_stride = 2 * layout_.k;
        t.x = from_ + row * t.x_stride + 2 * kStep * step;
        t.rows = rows_at(row);
        t.k = layout_.k - kStep * step;
        t.steps = steps_at(step);
        t.out = rows_from(row, step);
        kernels_.arrange_rows(t);
      }
    });
  }

  // Splits the columns, so that each weight is dequantized once, and the rows too where there are
  // more threads than that.
  void multiply() {
    const int64_t wanted = parallel_.threads() == 1 ? 1 : 4 * parallel_.threads();
    const int64_t held = std::max<int64_t>(1, kWeightBytes / (2 * kWide * steps_ * kStep));
    const int64_t work = (rows_ + kDequantizeRows) * steps_ * kStep * kWide;
    const int64_t least = std::min(blocks_of(kTaskWork, work), wide_);
    const int64_t task_wide = std::min(held, std::max(least, blocks_of(wide_, wanted)));
    const int64_t tasks = blocks_of(wide_, task_wide);
    const int64_t row_tasks = std::min(blocks_of(wanted, tasks), blocks_of(rows_, kChunkRows));
    const int64_t task_rows = blocks_of(blocks_of(rows_, kChunkRows), row_tasks) * kChunkRows;
    std::atomic<uint64_t> key{0};
    parallel_.run(tasks * blocks_of(rows_, task_rows), [&](int64_t task) {
      const int64_t row = task / tasks * task_rows, first = task % tasks * task_wide;
      const int64_t count = std::min(task_wide, wide_ - first);
      key.fetch_add(multiply_task(row, std::min(rows_, row + task_rows), first, count),
                    std::memory_order_relaxed);
    });
    // What was made of quantized values that turn out to be damaged is not returned.
    if (begin_ == 0) {
      check_payloads(panel_at(args_.weights, 0), layout_, 0, args_.weights.panels, key.load(),
                     parallel_);
    }
  }

  // Of rows `row` to `end`, and `count` times 32 columns. Returns the sum of the keys of panels.
  uint64_t multiply_task(int64_t row, int64_t end, int64_t first, int64_t count) {
    const int64_t columns = layout_.columns(), w_stride = 16 * steps_ * kStep;
    const int64_t panel = first * kWide / columns;
    const int64_t panels = std::min(count * kWide / columns, args_.weights.panels - panel);
    uint64_t keys = 0;
    // Each header once, where its panel is about to be read.
    if (begin_ == 0 && row == 0) keys = check_headers(args_.weights, panel, panels);
    const int64_t width = panels * columns;
    Dequantize d;
    d.layout = &layout_;
    d.steps = steps_;
    d.out_stride = w_stride;
    auto* weights = Arena<WeightsTag>::get_array<uint16_t>(width / 16 * w_stride);
    auto* rests = Arena<RestsTag>::get_array<float>(width);
    for (int64_t i = 0; i < panels; ++i) {
      d.panel = panel_at(args_.weights, panel + i);
      d.out = weights + i * columns / 16 * w_stride;
      d.rests = rests + i * columns;
      kernels_.dequantize(d);
    }
    FloatTile t;
    t.w_stride = w_stride;
    t.panels = width / 16;
    t.sums_stride = width;
    t.sums = Arena<FloatSumsTag>::get_array<float>(std::min(end - row, kChunkRows) * width);
    for (; row < end; row += kChunkRows) {
      t.rows = rows_at(row);
      for (int64_t step = 0; step < steps_; step += kBlockSteps) {
        t.x = rows_from(row, step);
        t.w = weights + step * kTileNumbers;
        t.steps = steps_at(step);
        t.first = step == 0;
        kernels_.multiply(t);
      }
      epilogue(t, row, panel * columns, layout_.group == 0 ? rests : nullptr);
    }
    if (kernels_.release != nullptr) kernels_.release();
    return keys;
  }

  void epilogue(const FloatTile& t, int64_t row, int64_t column, const float* rests) {
    Epilogue f{};
    f.totals = t.sums;
    f.stride = t.sums_stride;
    f.rows = t.rows;
    f.digits = 1;
    f.scales = reinterpret_cast<const uint8_t*>(rests);
    f.scales_stride = 64;
    f.out = output_of(args_, begin_ + row, column,
                      std::min(args_.weights.n - column, t.panels * 16));
    kernels_.epilogue(f);
  }

  const Matmul& args_;
  const PanelLayout layout_;
  const Parallel& parallel_;
  const FloatKernels& kernels_;
  const int64_t steps_;  // of K
  const int64_t wide_;   // times 32 columns
  int64_t begin_ = 0, rows_ = 0;
  const uint8_t* from_ = nullptr;  // rows of x from `begin_` on
  uint16_t* x_ = nullptr;
};

}  // namespace

const FloatKernels* float_kernels_of([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAmx) return &amx_float_kernels();
  // Processors with AVX512-BF16 have no instruction set of their own: it is these few functions.
  if (isa == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16")) return &avx512_float_kernels();
#endif
  return nullptr;
}

const FloatKernels* floats_suit(const Matmul& args, Isa isa) {
  const FloatKernels* kernels = float_kernels_of(isa);
  if (kernels == nullptr || args.x_dtype != DType::BF16) return nullptr;
  if (args.rotation.block != 0 || args.x_scale != nullptr) return nullptr;
  const PanelLayout& layout = args.weights.layout;
  bool suits = false;
  if (args.digits == 0) {
    suits = args.m >= (isa == Isa::kAmx ? least_rows_amx(layout) : least_rows_avx512(layout));
  } else if (args.digits == 1) {
    suits = kernels->round_row != nullptr && layout.group != 0 && args.m >= kLeastRounded;
  }
  return suits ? kernels : nullptr;
}

void multiply_floats(const Matmul& args, const Parallel& parallel, const FloatKernels& kernels) {
  FloatMatmul(args, parallel, kernels).run();
}

}  // namespace jaxtap
