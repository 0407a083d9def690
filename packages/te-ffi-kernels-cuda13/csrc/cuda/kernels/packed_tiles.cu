// A block has a tile of 128 rows and 64 columns, a thread 8 x 4 of it. Words of four codes along k
// are put in shared memory with rows, or columns, side by side, so that threads read vectors.
#include <limits>

#include "cuda/kernels/packed.h"
#include "cuda/kernels/panels.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBits = 8, kCols = kColsOf<kBits>;
constexpr int kRows = 128, kPanelsOfTile = 4, kTileCols = kPanelsOfTile * kCols;
constexpr int kRowsOfThread = 8, kColsOfThread = 4;
constexpr int kAcross = kTileCols / kColsOfThread;
constexpr int kWords = 8;              // along k, at once
constexpr int kRowStride = kRows + 4;  // so that threads write to different banks

struct Args {
  const uint32_t* x;  // [m, lines]
  const float* x_scales;
  Panels weight;
  void* y;
  te::Float y_dtype;
  int64_t m, tiles_across, groups, group_lines;
};

__global__ void __launch_bounds__(kThreads, 2) packed_tiles_kernel(Args args) {
  const Panels& weight = args.weight;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) / args.tiles_across * kRows;
  const int64_t first_panel =
      static_cast<int64_t>(blockIdx.x) % args.tiles_across * kPanelsOfTile;
  alignas(16) __shared__ uint32_t of_x[kWords][kRowStride];
  alignas(16) __shared__ uint32_t of_weight[kWords][kTileCols];
  const int row = thread / kAcross * kRowsOfThread, col = thread % kAcross * kColsOfThread;
  const int64_t panel = first_panel + col / kCols;
  const bool inside = panel < weight.count;
  const uint8_t* first = weight.data + (inside ? panel : 0) * weight.bytes;
  const float* scales = reinterpret_cast<const float*>(first + kPanelHeader) + col % kCols;
  float y[kRowsOfThread][kColsOfThread] = {};
  for (int64_t group = 0; group < args.groups; ++group) {
    int32_t sums[kRowsOfThread][kColsOfThread] = {};
    const int64_t end = (group + 1) * args.group_lines;
    for (int64_t line = group * args.group_lines; line < end; line += kWords) {
      const int words = static_cast<int>(end - line < kWords ? end - line : kWords);
      __syncthreads();  // they may be in use from the last time
      for (int i = thread; i < kRows * kWords; i += kThreads) {
        const int at = i / kWords, word = i % kWords;
        const bool there = first_row + at < args.m && word < words;
        of_x[word][at] = there ? args.x[(first_row + at) * weight.lines + line + word] : 0;
      }
      if (thread < kTileCols / kQuad * kWords) {
        const int word = thread % (kQuad * kWords) / kQuad, at = thread / (kQuad * kWords);
        Vector<uint32_t, kQuad> four = {};
        if (first_panel + at < weight.count && word < words) {
          const uint8_t* from = line_of<kBits>(weight, weight.data + (first_panel + at) * weight.bytes,
                                               group, line + word) +
                                thread % kQuad * 16;
          four = read<kQuad>(reinterpret_cast<const uint32_t*>(from));
          // Codes are stored with 128 added: the highest bit is the other way round.
          JAXTAP_UNROLL
          for (int c = 0; c < kQuad; ++c) four.at[c] ^= 0x80808080u;
        }
        write<kQuad>(&of_weight[word][at * kCols + thread % kQuad * kQuad], four);
      }
      __syncthreads();
      for (int word = 0; word < words; ++word) {
        const auto a = read<kQuad>(&of_x[word][row]), b = read<kQuad>(&of_x[word][row + kQuad]);
        const auto w = read<kColsOfThread>(&of_weight[word][col]);
        JAXTAP_UNROLL
        for (int r = 0; r < kRowsOfThread; ++r) {
          const uint32_t x = r < kQuad ? a.at[r % kQuad] : b.at[r % kQuad];
          JAXTAP_UNROLL
          for (int c = 0; c < kColsOfThread; ++c) {
            sums[r][c] = __dp4a(static_cast<int32_t>(x), static_cast<int32_t>(w.at[c]), sums[r][c]);
          }
        }
      }
    }
    if (!inside) continue;
    const auto scale = read<kColsOfThread>(scales + group * kCols);
    JAXTAP_UNROLL
    for (int r = 0; r < kRowsOfThread; ++r) {
      if (first_row + row + r >= args.m) break;
      const float x_scale = args.x_scales[(first_row + row + r) * args.groups + group];
      JAXTAP_UNROLL
      for (int c = 0; c < kColsOfThread; ++c) {
        y[r][c] += static_cast<float>(sums[r][c]) * x_scale * scale.at[c];
      }
    }
  }
  if (!inside) return;
  const bool good = fits(weight, panel);
  const int64_t column = first_panel * kCols + col;
  JAXTAP_UNROLL
  for (int r = 0; r < kRowsOfThread; ++r) {
    if (first_row + row + r >= args.m) break;
    JAXTAP_UNROLL
    for (int c = 0; c < kColsOfThread; ++c) {
      if (column + c >= weight.n) break;
      store_one(args.y_dtype, args.y, (first_row + row + r) * weight.n + column + c,
                good ? y[r][c] : std::numeric_limits<float>::quiet_NaN());
    }
  }
}

}  // namespace

void packed_tiles(const PackedDot& given, Stream stream) {
  Args args = {};
  args.x = reinterpret_cast<const uint32_t*>(given.x);
  args.x_scales = given.x_scales;
  args.weight = panels_of(given.weight, given.layout, given.n);
  args.y = given.y;
  args.y_dtype = given.y_dtype;
  args.m = given.m;
  args.tiles_across = ceil_of(args.weight.count, kPanelsOfTile);
  args.groups = args.weight.groups;
  args.group_lines = args.weight.group_lines;
  launch(packed_tiles_kernel, ceil_of(given.m, kRows) * args.tiles_across, kThreads, stream, args);
}

}  // namespace jaxtap::cuda
