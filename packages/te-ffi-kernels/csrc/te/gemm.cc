// The method is that of Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix
// Multiplication": panels of both factors are copied, here to float32, in the order in which the
// inner kernel reads them, in blocks that stay in the caches. Quantized values are exact in
// float32; scales of MX blocks, powers of two, are multiplied in then, the others into the result.

#include "te/gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "activations/table.h"
#include "common/arena.h"
#include "te/table.h"

namespace jaxtap::te {
namespace {

constexpr int64_t kDepth = 256;          // of k at once
constexpr int64_t kSerialBelow = 1 << 16;  // products that one thread is as fast for
constexpr int64_t kPanel = 2 << 20;      // numbers of rhs at once
constexpr int64_t kMostCols = 1024;      // of the result at once
constexpr int64_t kRowsAtOnce = 96;

struct Line {};
struct LhsPanel {};
struct RhsPanel {};
struct Result {};
struct Exact {};

// Reads parts of lines of a factor as float32.
class Reader {
 public:
  Reader(const Table& table, const Factor& factor, Scaling scaling, int64_t lanes, int64_t k)
      : table_(table), factor_(factor), mx_(scaling == Scaling::kMx), lanes_(lanes), k_(k) {}

  // Lanes [lane, lane + lanes) of k [at, at + depth), as [lanes / width][depth][width]; lanes that
  // there aren't are 0.
  void pack(int64_t lane, int64_t lanes, int64_t at, int64_t depth, int64_t width, float* to) {
    const int64_t used = std::min(lanes, lanes_ - lane);
    if (used < lanes) std::memset(to, 0, static_cast<size_t>(lanes * depth) * sizeof(float));
    if (factor_.k_is_last) {
      float* line = Arena<Line>::get_array<float>(depth);
      for (int64_t i = 0; i < used; ++i) {
        read(lane + i, at, depth, line);
        float* column = to + i / width * width * depth + i % width;
        for (int64_t j = 0; j < depth; ++j) column[j * width] = line[j];
      }
    } else {
      float* line = Arena<Line>::get_array<float>(lanes);
      for (int64_t j = 0; j < depth; ++j) {
        read(at + j, lane, used, line);
        for (int64_t i = 0; i < used; i += width) {
          std::memcpy(to + i * depth + j * width, line + i,
                      static_cast<size_t>(std::min(width, used - i)) * sizeof(float));
        }
      }
    }
  }

 private:
  // Places [at, at + count) of a line: of lane `line`, or of all lanes at k `line`.
  void read(int64_t line, int64_t at, int64_t count, float* to) const {
    const int64_t length = factor_.k_is_last ? k_ : lanes_;
    const int64_t from = line * length + at;
    const auto* bytes = static_cast<const uint8_t*>(factor_.data);
    switch (factor_.dtype) {
      case DType::F32:
      case DType::BF16:
      case DType::F16:
        table_.load[static_cast<int>(float_of(factor_.dtype))](
            bytes + from * static_cast<int64_t>(byte_size(factor_.dtype)), to, count);
        break;
      default:
        table_.decode[static_cast<int>(qtype_of(factor_.dtype))](bytes + from, to, count);
    }
    if (!mx_) return;
    const auto* scales = static_cast<const uint8_t*>(factor_.scales);
    if (factor_.k_is_last) {
      table_.scale_blocks(to, count, scales + line * (k_ / kBlock) + at / kBlock);
    } else {
      table_.scale_columns(to, count, scales + line / kBlock * lanes_ + at);
    }
  }

  const Table& table_;
  const Factor& factor_;
  const bool mx_;
  const int64_t lanes_, k_;
};

// Columns [begin, end) of the result.
struct Strip {
  int64_t begin, end;
  const float* packed;  // of rhs: [depths][panels][depth][tile_cols]
};

class BlockedGemm {
 public:
  BlockedGemm(const Gemm& args, const Parallel& parallel)
      : args_(args),
        parallel_(parallel),
        table_(te::table()),
        exact_(args.lhs.dtype == DType::S8) {
    rows_ = divide_up(std::min(kRowsAtOnce, std::max<int64_t>(args.m, 1)), table_.tile_rows) *
            table_.tile_rows;
    const int64_t fit = kPanel / std::max<int64_t>(args.k, 1);
    const int64_t cols = std::min({std::max<int64_t>(fit, 128), kMostCols, args.n});
    cols_ = divide_up(cols, table_.tile_cols) * table_.tile_cols;
    if (args.bias != nullptr) {
      bias_.resize(static_cast<size_t>(args.n));
      table_.load[static_cast<int>(args.out_dtype)](args.bias, bias_.data(), args.n);
    }
  }

  void run() {
    for (int64_t begin = 0; begin < args_.n; begin += cols_) {
      strip(begin, std::min(args_.n, begin + cols_));
    }
  }

 private:
  float tensor_scale(const Factor& factor) const {
    return *static_cast<const float*>(factor.scales);
  }

  void strip(int64_t begin, int64_t end) {
    const int64_t width = table_.tile_cols;
    const int64_t panels = divide_up(end - begin, width);
    float* packed = Arena<RhsPanel>::get_array<float>(args_.k * panels * width);
    const int64_t depths = divide_up(args_.k, kDepth);
    // Some panels of one depth each: a line of rhs is long in one layout, short in the other.
    const int64_t group = args_.rhs.k_is_last ? 1 : 4;
    const int64_t groups = divide_up(panels, group);
    parallel_.run(depths * groups, [&](int64_t task) {
      const int64_t at = task / groups * kDepth, depth = std::min(kDepth, args_.k - at);
      const int64_t first = task % groups * group, count = std::min(group, panels - first);
      Reader(table_, args_.rhs, args_.scaling, args_.n, args_.k)
          .pack(begin + first * width, count * width, at, depth, width,
                packed + at * panels * width + first * width * depth);
    });

    const int64_t blocks = divide_up(args_.m, rows_);
    // More tasks than threads, if need be by parts of the strip.
    const int64_t wanted = divide_up(4 * parallel_.threads(), std::max<int64_t>(blocks, 1));
    const int64_t share = parallel_.threads() == 1 ? panels : divide_up(panels, wanted);
    const int64_t shares = divide_up(panels, share);
    parallel_.run(blocks * shares, [&](int64_t task) {
      block(task / shares, {begin, end, packed}, task % shares * share,
            std::min(share, panels - task % shares * share), panels);
    });
  }

  // Rows of block `index`, in panels [first, first + count) of the strip.
  void block(int64_t index, const Strip& strip, int64_t first, int64_t count, int64_t panels) {
    const int64_t height = table_.tile_rows, width = table_.tile_cols;
    const int64_t row = index * rows_, rows = std::min(rows_, args_.m - row);
    const int64_t tiles = divide_up(rows, height), stride = count * width;
    float* lhs = Arena<LhsPanel>::get_array<float>(tiles * height * kDepth);
    float* c = Arena<Result>::get_array<float>(tiles * height * stride);
    int32_t* exact =
        exact_ ? Arena<Exact>::get_array<int32_t>(tiles * height * stride) : nullptr;
    if (args_.k == 0) {
      std::memset(c, 0, static_cast<size_t>(tiles * height * stride) * sizeof(float));
    }
    for (int64_t at = 0; at < args_.k; at += kDepth) {
      const int64_t depth = std::min(kDepth, args_.k - at);
      Reader(table_, args_.lhs, args_.scaling, args_.m, args_.k)
          .pack(row, tiles * height, at, depth, height, lhs);
      const float* rhs = strip.packed + at * panels * width;
      for (int64_t p = 0; p < count; ++p) {
        for (int64_t t = 0; t < tiles; ++t) {
          table_.matmul(depth, lhs + t * height * depth, rhs + (first + p) * width * depth,
                         c + t * height * stride + p * width, stride, at == 0 || exact_);
        }
      }
      // Sums of 256 products of int8 are exact in float32; sums of those in integers.
      if (exact_) add_exact(exact, c, tiles * height * stride, at == 0, at + depth == args_.k);
    }
    const int64_t col = strip.begin + first * width;
    const int64_t cols = std::min(strip.end, col + stride) - col;
    for (int64_t i = 0; i < rows; ++i) finish(row + i, col, cols, c + i * stride);
  }

  static void add_exact(int32_t* sums, float* c, int64_t count, bool first, bool last) {
    if (first) std::memset(sums, 0, static_cast<size_t>(count) * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<int32_t>(c[i]);
    if (!last) return;
    for (int64_t i = 0; i < count; ++i) c[i] = static_cast<float>(sums[i]);
  }

  // From sums of products to a part of a row of the result.
  void finish(int64_t row, int64_t col, int64_t cols, float* line) {
    if (args_.scaling == Scaling::kChannel) {
      table_.multiply(line, cols, static_cast<const float*>(args_.lhs.scales)[row]);
      table_.multiply_each(line, cols, static_cast<const float*>(args_.rhs.scales) + col);
    } else if (is_tensor(args_.scaling)) {
      table_.multiply(line, cols, tensor_scale(args_.lhs) * tensor_scale(args_.rhs));
    }
    if (args_.alpha != 1.0f) table_.multiply(line, cols, args_.alpha);
    if (!bias_.empty()) table_.add(bias_.data() + col, line, cols);
    const int dtype = static_cast<int>(args_.out_dtype);
    const int64_t at = (row * args_.n + col) * bytes_of(args_.out_dtype);
    if (args_.gelu) gelu(line, cols);
    table_.store[dtype](line, static_cast<char*>(args_.out) + at, cols);
  }

  static void gelu(float* line, int64_t cols) {
    constexpr int64_t kSome = 256;
    float before[kSome];
    const auto forward =
        activations::table().forward[static_cast<int>(activations::Function::kGelu)];
    for (int64_t i = 0; i < cols; i += kSome) {
      const int64_t count = std::min(kSome, cols - i);
      std::memcpy(before, line + i, static_cast<size_t>(count) * sizeof(float));
      forward(before, line + i, count, activations::Params());
    }
  }

  const Gemm& args_;
  const Parallel& parallel_;
  const Table& table_;
  const bool exact_;
  int64_t rows_ = 0, cols_ = 0;
  std::vector<float> bias_;
};

}  // namespace

void gemm(const Gemm& args, const Parallel& pool) {
  const int64_t few = kSerialBelow / std::max<int64_t>(args.k, 1);
  const Parallel parallel = args.m * args.n <= few ? Parallel() : pool;
  if (args.n == 0) return;
  BlockedGemm(args, parallel).run();
}

}  // namespace jaxtap::te
