// A block has a panel of 16 columns, and one row of codes or four. With groups its warps have a
// group each at a time; without, all share the lines. A thread reads four columns of a line: 16
// bytes, and as many rows of the weight as a word of codes has.
#include <limits>

#include "cuda/kernels/packed.h"
#include "cuda/kernels/panels.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kBits = 8, kCols = kColsOf<kBits>;
constexpr int kSlots = kWarp / kQuad;  // lines that a warp reads at once

struct Args {
  const int32_t* x;  // [m, lines]
  const float* x_scales;
  Panels weight;
  void* y;
  te::Float y_dtype;
  int64_t m, row_blocks, groups, group_lines;
};

template <int kRows, bool kGroups>
__global__ void packed_dot_kernel(Args args) {
  const Panels& weight = args.weight;
  const int64_t index = static_cast<int64_t>(blockIdx.x) / args.row_blocks;
  const int64_t first = static_cast<int64_t>(blockIdx.x) % args.row_blocks * kRows;
  const uint8_t* panel = weight.data + index * weight.bytes;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int quad = lane % kQuad;
  const uint8_t* codes = line_of<kBits>(weight, panel, 0, 0) + quad * 16;
  // The number that this thread puts together in the end.
  const int row = static_cast<int>(threadIdx.x) / kCols;
  const int col = static_cast<int>(threadIdx.x) % kCols;
  const int64_t column = index * kCols + col;
  const bool mine = row < kRows && first + row < args.m && column < weight.n;
  const float* scales = reinterpret_cast<const float*>(panel + kPanelHeader) + col;
  const float* x_scales = args.x_scales + (mine ? (first + row) * args.groups : 0);
  __shared__ int32_t of_warps[kWarps][kRows][kCols];
  float y = 0.0f;
  for (int64_t begin = 0; begin < args.groups; begin += kWarps) {
    const int64_t group = begin + warp;
    const int64_t from = kGroups ? group * args.group_lines : warp * kSlots;
    const int64_t group_end = from + args.group_lines;
    const int64_t end = kGroups && group_end < weight.lines ? group_end : weight.lines;
    int32_t sums[kRows][kQuad] = {};
    for (int64_t line = from + lane / kQuad; line < end;
         line += kGroups ? kSlots : kSlots * kWarps) {
      const auto four = read<kQuad>(reinterpret_cast<const uint32_t*>(codes + line * kLineOf<kBits>));
      JAXTAP_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (first + r >= args.m) break;
        const int32_t x = args.x[(first + r) * weight.lines + line];
        JAXTAP_UNROLL
        for (int c = 0; c < kQuad; ++c) {
          // Codes are stored with 128 added: the highest bit is the other way round.
          sums[r][c] = __dp4a(x, static_cast<int32_t>(four.at[c] ^ 0x80808080u), sums[r][c]);
        }
      }
    }
    JAXTAP_UNROLL
    for (int r = 0; r < kRows; ++r) {
      JAXTAP_UNROLL
      for (int c = 0; c < kQuad; ++c) {
        int32_t sum = sums[r][c];
        JAXTAP_UNROLL
        for (int step = kQuad; step < kWarp; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane < kQuad) of_warps[warp][r][quad * kQuad + c] = sum;
      }
    }
    __syncthreads();
    if (mine) {
      int32_t sum = 0;
      JAXTAP_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        const int32_t part = of_warps[w][row][col];
        sum += part;
        if (kGroups && begin + w < args.groups) {
          y += static_cast<float>(part) * x_scales[begin + w] * scales[(begin + w) * kCols];
        }
      }
      if (!kGroups) y = static_cast<float>(sum) * *x_scales * *scales;
    }
    __syncthreads();
  }
  if (!mine) return;
  if (!fits(weight, index)) y = std::numeric_limits<float>::quiet_NaN();
  store_one(args.y_dtype, args.y, (first + row) * weight.n + column, y);
}

template <bool kGroups>
void run(Args args, Stream stream) {
  constexpr int kRows = 4;
  if (args.m == 1) {
    args.row_blocks = 1;
    launch(packed_dot_kernel<1, kGroups>, args.weight.count, kThreads, stream, args);
  } else {
    args.row_blocks = ceil_of(args.m, kRows);
    launch(packed_dot_kernel<kRows, kGroups>, args.weight.count * args.row_blocks, kThreads, stream,
           args);
  }
}

}  // namespace

void packed_dot(const PackedDot& given, Stream stream) {
  if (given.m == 0 || given.n == 0) return;
  Args args = {};
  args.x = reinterpret_cast<const int32_t*>(given.x);
  args.x_scales = given.x_scales;
  args.weight = panels_of(given.weight, given.layout, given.n);
  args.y = given.y;
  args.y_dtype = given.y_dtype;
  args.m = given.m;
  args.groups = args.weight.groups;
  args.group_lines = args.weight.group_lines;
  if (given.layout.group == 0) return run<false>(args, stream);
  run<true>(args, stream);
}

}  // namespace jaxtap::cuda
