#include "training/dot_int8.h"

#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "common/error.h"
#include "matmul/kernels.h"
#include "te/table.h"

namespace jaxtap::training {
namespace {

constexpr int64_t kPanel = 16;     // columns of rhs
constexpr int64_t kMostRows = 128;  // of a task: with a few panels they fit a thread's cache
constexpr int64_t kWorthThread = 1 << 17;  // numbers to arrange
constexpr int32_t kZeroPoint = 128;

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));

// Columns of four rows, with the zero point.
inline void interleave(const Bytes* rows, uint8_t* out) {
  const auto low = [](Bytes a, Bytes b) {
    return (Pairs)__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                          23);
  };
  const auto high = [](Bytes a, Bytes b) {
    return (Pairs)__builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                          30, 15, 31);
  };
  const Pairs halves[2][2] = {{low(rows[0], rows[1]), low(rows[2], rows[3])},
                              {high(rows[0], rows[1]), high(rows[2], rows[3])}};
  for (const auto& [first, second] : halves) {
    const Pairs columns[2] = {__builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11),
                              __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15)};
    for (const Pairs& four : columns) {
      const Bytes words = (Bytes)four ^ static_cast<uint8_t>(kZeroPoint);
      std::memcpy(out, &words, sizeof(words));
      out += sizeof(words);
    }
  }
}

struct LeftTag {};
struct OffsetsTag {};
struct RightTag {};
struct SumsTag {};

// A product: lhs transposed, so that what is summed is adjacent, and rhs in panels as the matmuls of
// packed weights have them, both for this call alone.
class Product {
 public:
  Product(const Dot& args, const Kernels& kernels)
      : args_(args), kernels_(kernels), table_(te::table()) {
    k_ = std::max<int64_t>(1, divide_up(args.k, 64)) * 64;
    // Rows a power of two apart would share cache sets.
    stride_ = k_ + 64;
    panels_ = divide_up(args.n, kPanel);
    panel_bytes_ = kScales + k_ * kPanel;
  }

  void run(int64_t group, const Parallel& pool) {
    const Dot& a = args_;
    lhs_ = a.lhs + group * a.k * a.m;
    rhs_ = a.rhs + group * a.k * a.n;
    row_scales_ = a.lhs_scales + group * a.m;
    column_scales_ = a.rhs_scales + group * a.n;
    out_ = a.out + group * a.m * a.n;
    left_ = Arena<LeftTag>::get_array<int8_t>(a.m * stride_);
    offsets_ = Arena<OffsetsTag>::get_array<int32_t>(a.m);
    right_ = Arena<RightTag>::get_array<uint8_t>(panels_ * panel_bytes_);
    const Parallel serial;
    const bool few = a.m * k_ / 4 * panels_ < 8 * kernels_.task_steps;
    const Parallel& parallel = few ? serial : pool;
    const int64_t grain = std::max<int64_t>(1, kWorthThread / k_);
    parallel.ranges(divide_up(a.m, te::kTile), divide_up(grain, te::kTile),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) transpose(i * te::kTile);
                    });
    parallel.ranges(panels_, divide_up(grain, kPanel), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) pack(i);
    });
    multiply(parallel);
  }

 private:
  static constexpr int64_t kScales = kPanel * sizeof(float);

  // Columns of lhs from `first` on, and what their sums are less by.
  void transpose(int64_t first) const {
    const int64_t columns = std::min<int64_t>(te::kTile, args_.m - first);
    int8_t* out = left_ + first * stride_;
    for (int64_t k = 0; k < args_.k; k += te::kTile) {
      table_.transpose(reinterpret_cast<const uint8_t*>(lhs_) + k * args_.m + first, args_.m,
                       reinterpret_cast<uint8_t*>(out) + k, stride_,
                       std::min<int64_t>(te::kTile, args_.k - k), columns, false);
    }
    for (int64_t i = 0; i < columns; ++i) {
      int8_t* row = out + i * stride_;
      std::memset(row + args_.k, 0, static_cast<size_t>(k_ - args_.k));
      int32_t sum = 0;
      for (int64_t k = 0; k < k_; k += 64) {
        int16_t part = 0;  // of 16 bits, of which a register holds twice as many
        for (int64_t j = 0; j < 64; ++j) part = static_cast<int16_t>(part + row[k + j]);
        sum += part;
      }
      offsets_[first + i] = kZeroPoint * sum;
    }
  }

  void pack(int64_t index) const {
    const int64_t first = index * kPanel, columns = std::min(kPanel, args_.n - first);
    const auto bytes = static_cast<size_t>(columns);
    uint8_t* panel = right_ + index * panel_bytes_;
    float scales[kPanel] = {};
    std::memcpy(scales, column_scales_ + first, bytes * sizeof(float));
    std::memcpy(panel, scales, sizeof(scales));
    panel += kScales;
    for (int64_t k = 0; k < k_; k += 4, panel += 4 * kPanel) {
      Bytes rows[4] = {};
      for (int64_t i = 0; i < std::min<int64_t>(4, args_.k - k); ++i) {
        const int8_t* from = rhs_ + (k + i) * args_.n + first;
        // A copy of a known size is one instruction.
        if (columns == kPanel) {
          std::memcpy(&rows[i], from, kPanel);
        } else {
          std::memcpy(&rows[i], from, bytes);
        }
      }
      interleave(rows, panel);
    }
  }

  // Rows are shared out, and panels too where there are few rows.
  void multiply(const Parallel& parallel) const {
    const int64_t threads = parallel.threads(), block = kernels_.block_panels;
    const int64_t rows = 32 * std::min(kMostRows / 32, divide_up(args_.m, 32 * threads));
    const int64_t row_tasks = divide_up(args_.m, rows);
    const int64_t parts = threads == 1 ? 1 : divide_up(2 * threads, row_tasks);
    const int64_t panels = divide_up(divide_up(panels_, parts), block) * block;
    const int64_t panel_tasks = divide_up(panels_, panels);
    parallel.run(row_tasks * panel_tasks, [&](int64_t task) {
      const int64_t r = task / panel_tasks * rows, p = task % panel_tasks * panels;
      const int64_t end = std::min(panels_, p + panels);
      const Release release{kernels_.release};
      for (int64_t i = p; i < end; i += block) {
        multiply_block(r, std::min(rows, args_.m - r), i, std::min(block, end - i));
      }
    });
  }

  void multiply_block(int64_t row, int64_t rows, int64_t panel, int64_t panels) const {
    const uint8_t* first = right_ + panel * panel_bytes_;
    Tile t{};
    t.x = left_ + row * stride_;
    t.x_stride = stride_;
    t.rows = rows;
    t.offsets = offsets_ + row;
    t.offsets_stride = 1;
    t.qvalues = first + kScales;
    t.qvalues_stride = panel_bytes_;
    t.panels = panels;
    t.sums_stride = kPanel * kernels_.block_panels;
    t.sums = Arena<SumsTag>::get_array<int32_t>(rows * t.sums_stride);
    Finish f{};
    f.sums = t.sums;
    f.stride = t.sums_stride;
    f.rows = rows;
    f.planes = 1;
    f.row_scales = row_scales_ + row;
    f.scales = first;
    f.scales_stride = panel_bytes_;
    const int64_t column = panel * kPanel, row_bytes = args_.n * sizeof(float);
    f.out.y = reinterpret_cast<uint8_t*>(out_ + row * args_.n + column);
    f.out.dtype = DType::F32;
    f.out.stride = row_bytes;
    f.out.columns = std::min(args_.n - column, panels * kPanel);
    multiply_exactly(kernels_, t, k_, f);
  }

  const Dot& args_;
  const Kernels& kernels_;
  const te::Table& table_;
  int64_t k_, stride_, panels_, panel_bytes_;
  const int8_t *lhs_ = nullptr, *rhs_ = nullptr;
  const float *row_scales_ = nullptr, *column_scales_ = nullptr;
  float* out_ = nullptr;
  int8_t* left_ = nullptr;       // [m, stride]
  int32_t* offsets_ = nullptr;   // [m]: zero point of rhs * sum of a row
  uint8_t* right_ = nullptr;     // panels: scales, then quantized values plus the zero point
};

}  // namespace

void dot_int8(const Dot& args, const Parallel& parallel, Isa isa) {
  if (args.k > kExactK) {
    throw invalid_argument("dot_int8: sums must have at most ", kExactK, " products, got ", args.k);
  }
  if (args.groups * args.m * args.n == 0) return;
  const Kernels& kernels = kernels_of(isa, args.m);
  const int64_t threads = parallel.threads();
  if (threads == 1 || args.groups < 2 * threads) {
    for (int64_t i = 0; i < args.groups; ++i) Product(args, kernels).run(i, parallel);
    return;
  }
  // Each stays in the caches of one thread.
  parallel.run(args.groups, [&](int64_t i) { Product(args, kernels).run(i, Parallel()); });
}

}  // namespace jaxtap::training
