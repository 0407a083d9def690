#include "training/dot_int8.h"

#include <algorithm>
#include <cstring>

#include "common/arena.h"
#include "common/error.h"
#include "common/pages.h"
#include "matmul/kernels.h"
#include "te/table.h"

namespace jaxtap::training {
namespace {

constexpr int64_t kPanel = 16;      // columns of rhs
constexpr int64_t kSwept = 4;        // panels that are packed at once: a line of the cache of each row
// Rows of a task: so many that with a few panels they fit a thread's cache, since each task reads all
// panels from memory.
constexpr int64_t kLeastRows = 128, kMostRows = 256, kBytesOfRows = int64_t{512} << 10;
constexpr int64_t kFewRows = 256;    // that a task takes whole, and packs panels for itself
constexpr int64_t kWorthThread = 1 << 17;  // numbers to arrange
// Bytes of a result from which it is written past the caches: most of it would be gone from them
// before anybody reads it, and a line that is written whole need not be read first. Pages that the
// system fills with zeros on first touch are in the caches then.
constexpr int64_t kPastCaches = int64_t{4} << 20;
constexpr int32_t kZeroPoint = 128;

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));
typedef uint32_t Fours __attribute__((vector_size(16)));

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

// Four numbers of each of four rows, four times: out[i] has those from 4 * i on, with the zero point.
inline void interleave_fours(const Bytes* rows, uint8_t* out, int64_t stride) {
  const auto low = [](Bytes a, Bytes b) {
    return __builtin_shufflevector((Fours)a, (Fours)b, 0, 4, 1, 5);
  };
  const auto high = [](Bytes a, Bytes b) {
    return __builtin_shufflevector((Fours)a, (Fours)b, 2, 6, 3, 7);
  };
  const Fours halves[2][2] = {{low(rows[0], rows[1]), low(rows[2], rows[3])},
                              {high(rows[0], rows[1]), high(rows[2], rows[3])}};
  for (const auto& [first, second] : halves) {
    for (const Fours& four : {__builtin_shufflevector(first, second, 0, 1, 4, 5),
                              __builtin_shufflevector(first, second, 2, 3, 6, 7)}) {
      const Bytes words = (Bytes)four ^ static_cast<uint8_t>(kZeroPoint);
      std::memcpy(out, &words, sizeof(words));
      out += stride;
    }
  }
}

// The first `count` of 16 numbers, and zeros. A copy of a known size is one instruction.
inline Bytes read_16(const int8_t* from, int64_t count) {
  Bytes read = {};
  if (count >= 16) {
    std::memcpy(&read, from, sizeof(read));
  } else if (count > 0) {
    std::memcpy(&read, from, static_cast<size_t>(count));
  }
  return read;
}

struct LeftTag {};
struct OffsetsTag {};
struct RightTag {};
struct SumsTag {};

// A product: lhs by rows, so that what is summed is adjacent, and rhs in panels as the matmuls of
// packed weights have them, both for this call alone.
class Product {
 public:
  Product(const Dot& args, const Kernels& kernels, const Parallel& pool)
      : args_(args), kernels_(kernels), table_(te::table()) {
    k_ = std::max<int64_t>(1, divide_up(args.k, 64)) * 64;
    // Rows a power of two apart would share cache sets.
    stride_ = k_ + 64;
    panels_ = divide_up(args.n, kPanel);
    panel_bytes_ = kScales + k_ * kPanel;
    const bool few = args.m * k_ / 4 * panels_ < 8 * kernels_.task_steps;
    if (!few) parallel_ = pool;
    // A weight is much larger than the few rows that it is multiplied with: panels that are packed
    // where they are used stay in a thread's cache, and no thread waits for the others to pack.
    const int64_t threads = parallel_.threads();
    packs_late_ =
        args.m <= kFewRows && (threads == 1 || panels_ >= 2 * threads * kernels_.block_panels);
  }

  void run(int64_t group) {
    const Dot& a = args_;
    lhs_ = a.lhs + group * a.k * a.m;
    rhs_ = a.rhs + group * a.k * a.n;
    row_scales_ = a.lhs_scales + group * a.m;
    column_scales_ = a.rhs_scales + group * a.n;
    out_ = a.out + group * a.m * a.n;
    const int64_t bytes = a.m * a.n * static_cast<int64_t>(sizeof(float));
    past_caches_ = bytes >= kPastCaches && has_pages(out_ + a.m * a.n / 2);
    left_ = Arena<LeftTag>::get_array<int8_t>(a.m * stride_);
    offsets_ = Arena<OffsetsTag>::get_array<int32_t>(a.m);
    if (!packs_late_) right_ = Arena<RightTag>::get_array<uint8_t>(panels_ * panel_bytes_);
    // Both sides in one loop: handing work to threads takes as long as arranging a few rows.
    const int64_t tiles = divide_up(a.m, te::kTile);
    const int64_t sweeps = packs_late_ ? 0 : divide_up(panels_, kSwept);
    parallel_.ranges(tiles + sweeps, kWorthThread / (te::kTile * k_),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t i = begin; i < end; ++i) arrange(i, tiles);
                     });
    multiply();
  }

 private:
  static constexpr int64_t kScales = kPanel * sizeof(float);

  void arrange(int64_t index, int64_t tiles) const {
    if (index < tiles) return arrange_rows(index * te::kTile);
    const int64_t panel = (index - tiles) * kSwept;
    pack(panel, std::min(kSwept, panels_ - panel), right_ + panel * panel_bytes_);
  }

  // Rows of the result from `first` on: numbers of lhs, and what their sums are less by.
  void arrange_rows(int64_t first) const {
    const int64_t rows = std::min<int64_t>(te::kTile, args_.m - first);
    int8_t* out = left_ + first * stride_;
    if (args_.lhs_last) {
      for (int64_t i = 0; i < rows; ++i) {
        std::memcpy(out + i * stride_, lhs_ + (first + i) * args_.k, static_cast<size_t>(args_.k));
      }
    } else {
      for (int64_t k = 0; k < args_.k; k += te::kTile) {
        table_.transpose(reinterpret_cast<const uint8_t*>(lhs_) + k * args_.m + first, args_.m,
                         reinterpret_cast<uint8_t*>(out) + k, stride_,
                         std::min<int64_t>(te::kTile, args_.k - k), rows, false);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
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

  // Panels from `first` on, to where the first of them goes.
  void pack(int64_t first, int64_t count, uint8_t* panels) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t column = (first + i) * kPanel, columns = std::min(kPanel, args_.n - column);
      float scales[kPanel] = {};
      std::memcpy(scales, column_scales_ + column, static_cast<size_t>(columns) * sizeof(float));
      std::memcpy(panels + i * panel_bytes_, scales, sizeof(scales));
    }
    for (int64_t i = 0; i < count; i += kSwept) {
      uint8_t* values = panels + i * panel_bytes_ + kScales;
      if (args_.rhs_last) {
        for (int64_t j = i; j < std::min(count, i + kSwept); ++j, values += panel_bytes_) {
          pack_rows((first + j) * kPanel, values);
        }
      } else {
        pack_columns((first + i) * kPanel, std::min(kSwept, count - i), values);
      }
    }
  }

  // Columns of rhs, of a few panels at once: rows far apart share cache sets, so a line of the cache
  // is gone when the next panel would read it again.
  void pack_columns(int64_t column, int64_t panels, uint8_t* out) const {
    const int64_t left = args_.n - column;
    for (int64_t k = 0; k < k_; k += 4, out += 4 * kPanel) {
      const int64_t rows = std::min<int64_t>(4, args_.k - k);
      const int8_t* from = rhs_ + k * args_.n + column;
      for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(from + (kAhead + i) * args_.n);
      for (int64_t p = 0; p < panels; ++p) {
        Bytes read[4] = {};
        for (int64_t i = 0; i < rows; ++i) {
          read[i] = read_16(from + i * args_.n + p * kPanel, left - p * kPanel);
        }
        interleave(read, out + p * panel_bytes_);
      }
    }
  }

  // A panel's columns, which are rows of rhs: four at a time, a line of the cache of each.
  void pack_rows(int64_t column, uint8_t* out) const {
    for (int64_t k = 0; k < k_; k += 64, out += 64 * kPanel) {
      for (int64_t c = 0; c < kPanel; c += 4) {
        const int64_t rows = args_.n - column - c;
        const int8_t* from = rhs_ + (column + c) * args_.k + k;
        for (int64_t r = 0; r < 4; ++r) __builtin_prefetch(from + r * args_.k + kAheadBytes);
        for (int64_t i = 0; i < 64; i += 16) {
          Bytes read[4] = {};
          for (int64_t r = 0; r < std::min<int64_t>(4, rows); ++r) {
            read[r] = read_16(from + r * args_.k + i, args_.k - k - i);
          }
          interleave_fours(read, out + i * kPanel + c * 4, 4 * kPanel);
        }
      }
    }
  }

  // Rows are shared out, and panels too where there are few rows.
  void multiply() const {
    const int64_t threads = parallel_.threads(), block = kernels_.block_panels;
    const int64_t fit = std::clamp(kBytesOfRows / k_, kLeastRows, kMostRows) / 32;
    const int64_t rows =
        packs_late_ ? args_.m : 32 * std::min(fit, divide_up(args_.m, 32 * threads));
    const int64_t row_tasks = divide_up(args_.m, rows);
    const int64_t parts = threads == 1 ? 1 : divide_up((packs_late_ ? 4 : 2) * threads, row_tasks);
    const int64_t panels = divide_up(divide_up(panels_, parts), block) * block;
    const int64_t panel_tasks = divide_up(panels_, panels);
    parallel_.run(row_tasks * panel_tasks, [&](int64_t task) {
      const int64_t r = task / panel_tasks * rows, p = task % panel_tasks * panels;
      const int64_t end = std::min(panels_, p + panels);
      const Release release{kernels_.release};
      for (int64_t i = p; i < end; i += block) {
        const int64_t count = std::min(block, end - i);
        const uint8_t* first = right_ + i * panel_bytes_;
        if (packs_late_) {
          uint8_t* packed = Arena<RightTag>::get_array<uint8_t>(block * panel_bytes_);
          pack(i, count, packed);
          first = packed;
        }
        multiply_block(r, std::min(rows, args_.m - r), i, count, first);
      }
      if (past_caches_) table_.fence();  // before others are told that this is done
    });
  }

  void multiply_block(int64_t row, int64_t rows, int64_t panel, int64_t panels,
                      const uint8_t* first) const {
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
    Epilogue f{};
    f.sums = t.sums;
    f.stride = t.sums_stride;
    f.rows = rows;
    f.digits = 1;
    f.row_scales = row_scales_ + row;
    f.scales = first;
    f.scales_stride = panel_bytes_;
    const int64_t column = panel * kPanel, row_bytes = args_.n * sizeof(float);
    f.out.y = reinterpret_cast<uint8_t*>(out_ + row * args_.n + column);
    f.out.dtype = DType::F32;
    f.out.stride = row_bytes;
    f.out.columns = std::min(args_.n - column, panels * kPanel);
    f.out.past_caches = past_caches_;
    multiply_exactly(kernels_, t, k_, f);
  }

  // What is fetched before it is packed: rows, and bytes of a row.
  static constexpr int64_t kAhead = 32, kAheadBytes = 384;

  const Dot& args_;
  const Kernels& kernels_;
  const te::Table& table_;
  Parallel parallel_;  // serial where the product is small
  int64_t k_, stride_, panels_, panel_bytes_;
  bool packs_late_, past_caches_ = false;
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
    for (int64_t i = 0; i < args.groups; ++i) Product(args, kernels, parallel).run(i);
    return;
  }
  // Each stays in the caches of one thread.
  parallel.run(args.groups, [&](int64_t i) { Product(args, kernels, Parallel()).run(i); });
}

}  // namespace jaxtap::training
