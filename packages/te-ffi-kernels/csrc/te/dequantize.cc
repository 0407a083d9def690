#include "te/dequantize.h"

#include <algorithm>

#include "common/arena.h"
#include "common/parallel.h"
#include "te/table.h"

namespace jaxtap::te {
namespace {

struct Numbers {};

constexpr int64_t kSerialBelow = 1 << 15;
constexpr int64_t kWide = 2048;

void row_part(const Dequantize& args, const Table& table, int64_t row, int64_t col, int64_t cols) {
  const int64_t at = row * args.cols + col;
  char* out = static_cast<char*>(args.out) + at * bytes_of(args.dtype);
  float* numbers = args.dtype == Float::kF32 ? reinterpret_cast<float*>(out)
                                             : Arena<Numbers>::get_array<float>(kWide);
  table.decode[static_cast<int>(args.qtype)](args.qvalues + at, numbers, cols);
  const auto* tensor = static_cast<const float*>(args.scales);
  const auto* blocks = static_cast<const uint8_t*>(args.scales);
  if (args.scaling == Scaling::kChannel) {
    table.multiply(numbers, cols, tensor[row]);
  } else if (args.scaling != Scaling::kMx) {
    table.multiply(numbers, cols, tensor[0]);
  } else if (args.by_column) {
    table.scale_columns(numbers, cols, blocks + row / kBlock * args.cols + col);
  } else {
    table.scale_blocks(numbers, cols, blocks + row * (args.cols / kBlock) + col / kBlock);
  }
  if (args.dtype != Float::kF32) table.store[static_cast<int>(args.dtype)](numbers, out, cols);
}

}  // namespace

void dequantize(const Dequantize& args, const Parallel& pool) {
  const Table& table = te::table();
  const Parallel parallel = args.rows * args.cols <= kSerialBelow ? Parallel() : pool;
  const int64_t parts = (args.cols + kWide - 1) / kWide;
  const int64_t grain = std::max<int64_t>(1, kSerialBelow / 2 / std::max<int64_t>(1, args.cols));
  parallel.ranges(args.rows * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i % parts * kWide;
      row_part(args, table, i / parts, col, std::min(kWide, args.cols - col));
    }
  });
}

}  // namespace jaxtap::te
