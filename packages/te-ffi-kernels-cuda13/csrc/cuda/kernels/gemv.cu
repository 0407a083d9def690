// A block has a panel, and one row of x or four. A thread reads four columns of some lines of codes:
// 16 bytes, with the rows of x that they are multiplied with. Sums of threads
// are added up in one order, whatever the device does.
#include "cuda/kernels/gemv.h"

#include <limits>

#include "cuda/kernels/panels.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

struct Args {
  const void* x;
  Panels weight;
  void* y;
  te::Float y_dtype;
  int64_t m, row_blocks;
  bool wide;  // rows of x may be read in vectors of 4
};

template <class X, int kBits, int kRows>
__global__ void gemv_kernel(Args args) {
  constexpr int kCols = kColsOf<kBits>, kDepth = kDepthOf<kBits>;
  constexpr int kQuads = kCols / kQuad;
  constexpr int kLines = kThreads / kQuads;  // that a block reads at once
  const int64_t panel_index = static_cast<int64_t>(blockIdx.x) / args.row_blocks;
  const int64_t first = static_cast<int64_t>(blockIdx.x) % args.row_blocks * kRows;
  const Panels& weight = args.weight;
  const uint8_t* panel = weight.data + panel_index * weight.bytes;
  const int quad = static_cast<int>(threadIdx.x) % kQuads;
  const auto* x = static_cast<const typename X::Type*>(args.x) + first * weight.k;
  float sums[kRows][kQuad] = {};
  float poison[kRows] = {};  // NaN for rows that aren't finite
  for (int64_t line = threadIdx.x / kQuads; line < weight.lines; line += kLines) {
    const int64_t group = weight.group == 0 ? 0 : line / weight.group_lines, at = line * kDepth;
    const uint8_t* codes = line_of<kBits>(weight, panel, group, line) + quad * 16;
    const auto four = read<kQuad>(reinterpret_cast<const uint32_t*>(codes));
    float scale[kQuad];
    JAXTAP_UNROLL
    for (int c = 0; c < kQuad; ++c) {
      scale[c] = weight.group == 0 ? 1.0f
                                   : scale_of<kBits>(weight, panel, group, quad * kQuad + c);
    }
    JAXTAP_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= args.m) break;
      float part[kQuad] = {};
      JAXTAP_UNROLL
      for (int half = 0; half < kDepth / 4; ++half) {
        float numbers[4];
        const int64_t from = at + 4 * half;
        load<X>(x + r * weight.k + from, weight.k - from, args.wide, numbers);
        JAXTAP_UNROLL
        for (int j = 0; j < 4; ++j) {
          poison[r] = fmaf(numbers[j], 0.0f, poison[r]);
          JAXTAP_UNROLL
          for (int c = 0; c < kQuad; ++c) {
            const uint32_t byte = four.at[c] >> (8 * j) & 0xffu;
            const uint32_t code = kBits == 8 ? byte : byte >> (4 * half) & 0xfu;
            part[c] = fmaf(numbers[j], number<kBits>(code), part[c]);
          }
        }
      }
      JAXTAP_UNROLL
      for (int c = 0; c < kQuad; ++c) sums[r][c] = fmaf(part[c], scale[c], sums[r][c]);
    }
  }
  __shared__ float of_warps[kWarps][kRows][kCols];
  JAXTAP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    JAXTAP_UNROLL
    for (int c = 0; c < kQuad; ++c) {
      float sum = sums[r][c] + poison[r];
      JAXTAP_UNROLL
      for (int step = kQuads; step < kWarp; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (threadIdx.x % kWarp < kQuads) of_warps[threadIdx.x / kWarp][r][quad * kQuad + c] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x >= kRows * kCols) return;
  const int row = static_cast<int>(threadIdx.x) / kCols, col = static_cast<int>(threadIdx.x) % kCols;
  const int64_t column = panel_index * kCols + col;
  if (first + row >= args.m || column >= weight.n) return;
  float y = 0.0f;
  JAXTAP_UNROLL
  for (int w = 0; w < kWarps; ++w) y += of_warps[w][row][col];
  if (weight.group == 0) y *= scale_of<kBits>(weight, panel, 0, col);
  if (!fits(weight, panel_index)) y = std::numeric_limits<float>::quiet_NaN();
  store_one(args.y_dtype, args.y, (first + row) * weight.n + column, y);
}

template <class X, int kBits>
void run(Args args, Stream stream) {
  constexpr int kRows = 4;
  if (args.m == 1) {
    args.row_blocks = 1;
    launch(gemv_kernel<X, kBits, 1>, args.weight.count, kThreads, stream, args);
  } else {
    args.row_blocks = ceil_of(args.m, kRows);
    launch(gemv_kernel<X, kBits, kRows>, args.weight.count * args.row_blocks, kThreads, stream,
           args);
  }
}

template <class X>
void run(const Args& args, Stream stream) {
  if (args.weight.bits == 8) {
    run<X, 8>(args, stream);
  } else {
    run<X, 4>(args, stream);
  }
}

}  // namespace

void gemv(const Gemv& given, Stream stream) {
  Args args = {};
  args.x = given.x;
  args.weight = panels_of(given.weight, given.layout, given.n);
  args.y = given.y;
  args.y_dtype = given.y_dtype;
  args.m = given.m;
  args.wide = given.layout.k % 4 == 0 &&
              aligned(given.x_dtype == te::Float::kF32 ? 16 : 8,
                      static_cast<const char*>(given.x));
  if (given.m == 0 || given.n == 0) return;
  switch (given.x_dtype) {
    case te::Float::kF32: return run<F32>(args, stream);
    case te::Float::kBF16: return run<BF16>(args, stream);
    case te::Float::kF16: return run<F16>(args, stream);
  }
}

}  // namespace jaxtap::cuda
