#include "te/quantize.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/arena.h"
#include "common/convert.h"
#include "common/isa_table.h"
#include "te/table.h"

namespace jaxtap::te {
namespace {

constexpr int64_t kSerialBelow = 1 << 15;  // numbers that one thread is as fast for
constexpr int64_t kMany = 1 << 22;  // quantized values that fill the caches
constexpr int64_t kChunks = 16;

// How a matrix is cut into tasks. It depends on shapes alone, so that sums are the same whatever
// the number of threads.
struct Cut {
  Cut(const Quantize& args) : rows(args.rows), cols(args.cols) {
    // Rows that are computed stay whole, and may be few.
    const bool whole = args.source != nullptr && args.colwise == nullptr;
    const int64_t unit = whole ? 1 : rows >= kChunks * kTile ? kTile : kBlock;
    const int64_t units = std::max<int64_t>(1, divide_up(rows, unit));
    chunk = divide_up(units, kChunks) * unit;
    chunks = std::max<int64_t>(1, divide_up(rows, chunk));
    // Whole rows where a scale is of a row.
    const int64_t wanted = args.scaling == Scaling::kChannel || whole ? 1 : divide_up(8, chunks);
    strip = std::max<int64_t>(kTile * 16, divide_up(divide_up(cols, wanted), kTile) * kTile);
    strips = std::max<int64_t>(1, divide_up(cols, strip));
  }

  int64_t tasks() const { return chunks * strips; }

  int64_t rows, cols;
  int64_t chunk, chunks;  // rows of a task, and how many such ranges
  int64_t strip, strips;  // columns of a task
};

// A part of the matrix as float32, and quantized values of it.
struct Tile {
  const float* numbers;
  int64_t stride;
  int64_t row, col, rows, cols;
};

class Task {
 public:
  Task(const Quantize& args, const Table& table)
      : args_(args),
        table_(table),
        qtype_(static_cast<int>(args.qtype)),
        past_caches_(args.rows * args.cols >= kMany) {}

  // Rows [row, row + rows) of columns [col, col + cols). `sums` is float[cols of x] or nullptr.
  // `factors` are for columns. Returns the largest magnitude's bits.
  int32_t run(int64_t row, int64_t rows, int64_t col, int64_t cols, float* sums,
              const float* factors) {
    int32_t most = 0;
    // Without quantized values by column, tiles are rows.
    const bool tall = args_.colwise != nullptr;
    const bool computed = args_.source != nullptr && !tall;
    const int64_t step_rows = tall ? kTile : computed ? 1 : 8;
    int64_t step_cols = tall ? kWide : kWide * 4;
    if (computed) step_cols = args_.scaling == Scaling::kChannel ? cols : args_.source->width();
    std::vector<float> row_scales(args_.scaling == Scaling::kChannel ? step_rows : 0);
    for (int64_t r = row; r < row + rows; r += step_rows) {
      const int64_t height = std::min(step_rows, row + rows - r);
      if (computed) args_.source->begin(r);
      if (computed && args_.scaling == Scaling::kChannel) set_row_scale(r, 0, row_scales.data());
      if (args_.scaling == Scaling::kChannel && args_.qvalues != nullptr && !computed) {
        set_row_scales(r, height, row_scales.data());
      }
      for (int64_t c = col; c < col + cols; c += step_cols) {
        const Tile tile = load(r, height, c, std::min(step_cols, col + cols - c));
        for (int64_t i = 0; i < height; ++i) {
          const float* line = tile.numbers + i * tile.stride;
          if (sums != nullptr) table_.add(line, sums + c, tile.cols);
          if (args_.wants_absmax) most = std::max(most, table_.absmax(line, tile.cols));
        }
        if (computed && args_.scaling == Scaling::kChannel) {
          set_row_scale(r, table_.absmax(tile.numbers, tile.cols), row_scales.data());
        }
        switch (args_.scaling) {
          case Scaling::kNone:
            plain(tile);
            break;
          case Scaling::kMx:
            mx(tile);
            break;
          case Scaling::kChannel:
            channel(tile, row_scales.data(), factors);
            break;
          default:
            tensor(tile);
        }
      }
    }
    if (past_caches_) table_.fence();
    return most;
  }

  // The largest magnitude of each column of some rows.
  void column_absmax(int64_t row, int64_t rows, int32_t* most) {
    for (int64_t r = row; r < row + rows; ++r) {
      for (int64_t c = 0; c < args_.cols; c += kWide * 4) {
        const Tile tile = load(r, 1, c, std::min(kWide * 4, args_.cols - c));
        table_.absmax_each(tile.numbers, most + c, tile.cols);
      }
    }
  }

 private:
  static constexpr int64_t kWide = 512;
  struct Numbers {};
  struct QValues {};
  struct Halves {};

  int64_t bytes() const { return bytes_of(args_.dtype); }

  Tile compute(int64_t row, int64_t rows, int64_t col, int64_t cols) {
    if (in_place()) {
      float* out = static_cast<float*>(args_.out) + row * args_.cols + col;
      args_.source->load(row, rows, col, cols, out, args_.cols);
      return {out, args_.cols, row, col, rows, cols};
    }
    float* numbers = Arena<Numbers>::get_array<float>(rows * cols);
    args_.source->load(row, rows, col, cols, numbers, cols);
    if (args_.rounded && args_.dtype != Float::kF32) {
      const int dtype = static_cast<int>(args_.dtype);
      auto* halves = Arena<Halves>::get_array<uint16_t>(rows * cols);
      table_.store[dtype](numbers, halves, rows * cols);
      table_.load[dtype](halves, numbers, rows * cols);
    }
    return {numbers, cols, row, col, rows, cols};
  }

  // Whether numbers are computed where they are to be.
  bool in_place() const { return args_.out != nullptr && args_.dtype == Float::kF32; }

  Tile load(int64_t row, int64_t rows, int64_t col, int64_t cols) {
    if (args_.source != nullptr) return compute(row, rows, col, cols);
    const char* from =
        static_cast<const char*>(args_.x) + (row * args_.cols + col) * bytes();
    if (args_.dtype == Float::kF32) {
      return {reinterpret_cast<const float*>(from), args_.cols, row, col, rows, cols};
    }
    float* numbers = Arena<Numbers>::get_array<float>(rows * cols);
    for (int64_t i = 0; i < rows; ++i) {
      table_.load[static_cast<int>(args_.dtype)](
          from + i * args_.cols * bytes(), numbers + i * cols, cols);
    }
    return {numbers, cols, row, col, rows, cols};
  }

  uint8_t* qvalues_at(const Tile& tile, int64_t i) const {
    return args_.qvalues + (tile.row + i) * args_.cols + tile.col;
  }

  void turn(const Tile& tile, const uint8_t* qvalues) {
    for (int64_t c = 0; c < tile.cols; c += kTile) {
      table_.transpose(qvalues + c, tile.cols,
                       args_.colwise + (tile.col + c) * args_.rows + tile.row, args_.rows,
                       tile.rows, std::min<int64_t>(kTile, tile.cols - c), past_caches_);
    }
  }

  void plain(const Tile& tile) {
    if (args_.out == nullptr || in_place()) return;
    for (int64_t i = 0; i < tile.rows; ++i) {
      char* to = static_cast<char*>(args_.out) +
                 ((tile.row + i) * args_.cols + tile.col) * bytes();
      table_.store[static_cast<int>(args_.dtype)](tile.numbers + i * tile.stride, to, tile.cols);
    }
  }

  void tensor(const Tile& tile) {
    if (args_.colwise == nullptr) {
      if (args_.qvalues == nullptr) return;
      for (int64_t i = 0; i < tile.rows; ++i) {
        table_.encode[qtype_](tile.numbers + i * tile.stride, qvalues_at(tile, i), tile.cols,
                             args_.scale);
      }
      return;
    }
    // By way of memory in which lines don't compete for the same places of the cache.
    uint8_t* qvalues = Arena<QValues>::get_array<uint8_t>(tile.rows * tile.cols);
    for (int64_t i = 0; i < tile.rows; ++i) {
      uint8_t* to = qvalues + i * tile.cols;
      table_.encode[qtype_](tile.numbers + i * tile.stride, to, tile.cols, args_.scale);
      if (args_.qvalues != nullptr) std::memcpy(qvalues_at(tile, i), to, tile.cols);
    }
    turn(tile, qvalues);
  }

  void set_row_scales(int64_t row, int64_t rows, float* scales) {
    for (int64_t i = 0; i < rows; ++i) {
      int32_t most = 0;
      for (int64_t c = 0; c < args_.cols; c += kWide * 4) {
        const Tile tile = load(row + i, 1, c, std::min(kWide * 4, args_.cols - c));
        most = std::max(most, table_.absmax(tile.numbers, tile.cols));
      }
      set_row_scale(row + i, most, scales + i);
    }
  }

  void set_row_scale(int64_t row, int32_t most, float* scale) {
    *scale = channel_scale(most, args_.qtype);
    static_cast<float*>(args_.scales)[row] = 1.0f / *scale;
  }

  void channel(const Tile& tile, const float* row_scales, const float* factors) {
    if (args_.qvalues != nullptr) {
      for (int64_t i = 0; i < tile.rows; ++i) {
        table_.encode[qtype_](tile.numbers + i * tile.stride, qvalues_at(tile, i), tile.cols,
                                  row_scales[i]);
      }
    }
    if (args_.colwise == nullptr) return;
    uint8_t* qvalues = Arena<QValues>::get_array<uint8_t>(tile.rows * tile.cols);
    for (int64_t i = 0; i < tile.rows; ++i) {
      table_.encode_each[qtype_](tile.numbers + i * tile.stride, qvalues + i * tile.cols,
                                     tile.cols, factors + tile.col);
    }
    turn(tile, qvalues);
  }

  void mx(const Tile& tile) {
    if (args_.qvalues != nullptr) {
      auto* scales = static_cast<uint8_t*>(args_.scales);
      for (int64_t i = 0; i < tile.rows; ++i) {
        table_.encode_blocks[qtype_](
            tile.numbers + i * tile.stride, qvalues_at(tile, i), tile.cols,
            scales + (tile.row + i) * (args_.cols / kBlock) + tile.col / kBlock);
      }
    }
    if (args_.colwise == nullptr) return;
    auto* scales = static_cast<uint8_t*>(args_.colwise_scales);
    for (int64_t block = 0; block < tile.rows; block += kBlock) {
      const float* top = tile.numbers + block * tile.stride;
      int32_t most[kWide] = {};
      float factors[kWide], halves[kWide];
      for (int64_t i = 0; i < kBlock; ++i) {
        table_.absmax_each(top + i * tile.stride, most, tile.cols);
      }
      table_.block_scales[qtype_](most, tile.cols,
                                 scales + (tile.row + block) / kBlock * args_.cols + tile.col,
                                 factors, halves);
      for (int64_t i = 0; i < kBlock; ++i) {
        table_.encode_times_each[qtype_](
            top + i * tile.stride,
            args_.colwise + (tile.row + block + i) * args_.cols + tile.col, tile.cols, factors,
            halves);
      }
    }
  }

 public:
  // What a slice is multiplied with: 1 where the largest magnitude is 0 or infinite. Its inverse is
  // never subnormal.
  static float channel_scale(int32_t most, QType qtype) {
    if (most == 0 || most >= 0x7f800000) return 1.0f;
    constexpr float kMost = 0x1p126f;
    const float scale = largest(qtype) / bits_float(static_cast<uint32_t>(most));
    return scale < kMost ? scale : kMost;
  }

 private:
  const Quantize& args_;
  const Table& table_;
  const int qtype_;
  const bool past_caches_;
};

struct Partial {};
struct Columns {};
struct Factors {};

// What columns are multiplied with, and the inverse in args.colwise_scales.
const float* column_factors(const Quantize& args, const Table& table, const Cut& cut,
                       const Parallel& parallel) {
  auto* most = Arena<Columns>::get_array<int32_t>(cut.chunks * args.cols);
  std::fill_n(most, cut.chunks * args.cols, 0);
  parallel.run(cut.chunks, [&](int64_t i) {
    const int64_t row = i * cut.chunk;
    Task(args, table)
        .column_absmax(row, std::max<int64_t>(0, std::min(cut.chunk, args.rows - row)),
                       most + i * args.cols);
  });
  auto* scales = static_cast<float*>(args.colwise_scales);
  float* factors = Arena<Factors>::get_array<float>(args.cols);
  for (int64_t c = 0; c < args.cols; ++c) {
    int32_t found = 0;
    for (int64_t i = 0; i < cut.chunks; ++i) found = std::max(found, most[i * args.cols + c]);
    if (found < 0x00800000) found = 0;  // subnormal
    factors[c] = Task::channel_scale(found, args.qtype);
    scales[c] = 1.0f / factors[c];
  }
  return factors;
}

}  // namespace

float quantize(const Quantize& args, const Parallel& pool) {
  const Table& table = te::table();
  const Parallel parallel = args.rows * args.cols <= kSerialBelow ? Parallel() : pool;
  const Cut cut(args);
  const float* factors = nullptr;
  if (args.scaling == Scaling::kChannel && args.colwise != nullptr) {
    factors = column_factors(args, table, cut, parallel);
  }
  float* sums = nullptr;
  if (args.sums != nullptr) {
    sums = Arena<Partial>::get_array<float>(cut.chunks * args.cols);
    std::fill_n(sums, cut.chunks * args.cols, 0.0f);
  }
  std::vector<int32_t> most(static_cast<size_t>(cut.tasks()), 0);
  parallel.run(cut.tasks(), [&](int64_t i) {
    const int64_t part = i / cut.strips, row = part * cut.chunk;
    const int64_t col = i % cut.strips * cut.strip;
    const int64_t rows = std::min(cut.chunk, args.rows - row);
    const int64_t cols = std::min(cut.strip, args.cols - col);
    if (rows <= 0) return;
    most[static_cast<size_t>(i)] =
        Task(args, table)
            .run(row, rows, col, cols, sums == nullptr ? nullptr : sums + part * args.cols,
                 factors);
  });
  if (sums != nullptr) {
    for (int64_t i = 1; i < cut.chunks; ++i) table.add(sums + i * args.cols, sums, args.cols);
    table.store[static_cast<int>(args.dtype)](sums, args.sums, args.cols);
  }
  return bits_float(static_cast<uint32_t>(*std::max_element(most.begin(), most.end())));
}

float tensor_scale(float absmax, QType qtype) {
  if (!(absmax > 0.0f) || float_bits(absmax) >= 0x7f800000u) return 1.0f;
  constexpr float kMost = 0x1.fffffep127f;
  const float scale = largest(qtype) / absmax;
  return scale < kMost ? scale : kMost;
}

}  // namespace jaxtap::te

JAXTAP_DEFINE_TABLE(te)
