// A block has a panel of 16 columns, and one row of x or four. A thread reads four columns of every
// 64th line of codes: 16 bytes, with the rows of x that they are multiplied with. Sums of threads
// are added up in one order, whatever the device does.
#include "cuda/kernels/gemv.h"

#include <limits>

#include "common/packed.h"
#include "cuda/formats.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kCols = 16, kQuad = 4;       // columns of a panel, and of a thread
constexpr int kLines = kThreads / kQuad;   // that a block reads at once
constexpr int kLine = 64;                  // bytes

struct Args {
  const void* x;
  const uint8_t* weight;
  void* y;
  te::Float y_dtype;
  int64_t m, k, n, group, row_blocks, panel_bytes, codes_offset, lines;
  int bits;
  bool wide;  // rows of x may be read in vectors of 4
};

JAXTAP_DEVICE uint32_t word(const uint8_t* panel, int at) {
  return reinterpret_cast<const uint32_t*>(panel)[at];
}

// Whether a panel says that it's of this weight.
JAXTAP_DEVICE bool fits(const Args& args, const uint8_t* panel, int columns) {
  constexpr uint32_t kMagic = 0x5057544au;  // "JTWP"
  uint32_t sum = 0;
  JAXTAP_UNROLL
  for (int i = 0; i < 6; ++i) sum += word(panel, i);
  const uint32_t kind = 1u | static_cast<uint32_t>(args.bits) << 8 |
                        static_cast<uint32_t>(columns) << 16;
  return word(panel, 0) == kMagic && word(panel, 1) == kind &&
         word(panel, 2) == static_cast<uint32_t>(args.k) &&
         word(panel, 3) == static_cast<uint32_t>(args.group) &&
         word(panel, 6) == (sum ^ 0x9E3779B9u);
}

// The code in the lowest bits of a word, whose others are zero, as a number: it's the last places
// of a float32 of 2**23.
template <int kBits>
JAXTAP_DEVICE float number(uint32_t code) {
  return bits_float(0x4b000000u | code) - (8388608.0f + (1 << (kBits - 1)));
}

JAXTAP_DEVICE void store_one(te::Float dtype, void* y, int64_t at, float value) {
  switch (dtype) {
    case te::Float::kF32: static_cast<float*>(y)[at] = value; break;
    case te::Float::kBF16: static_cast<uint16_t*>(y)[at] = BF16::store(value); break;
    case te::Float::kF16: static_cast<uint16_t*>(y)[at] = F16::store(value); break;
  }
}

template <class X, int kBits, int kRows>
__global__ void gemv_kernel(Args args) {
  constexpr int kDepth = kBits == 8 ? 4 : 8;  // rows of the weight in a line
  const int64_t panel_index = static_cast<int64_t>(blockIdx.x) / args.row_blocks;
  const int64_t first = static_cast<int64_t>(blockIdx.x) % args.row_blocks * kRows;
  const uint8_t* panel = args.weight + panel_index * args.panel_bytes;
  const int quad = static_cast<int>(threadIdx.x) % kQuad;
  const auto* scales = reinterpret_cast<const float*>(panel + kPanelHeader);
  const uint8_t* codes = panel + args.codes_offset + quad * 16;
  const auto* x = static_cast<const typename X::Type*>(args.x) + first * args.k;
  float sums[kRows][kQuad] = {};
  float poison[kRows] = {};  // NaN for rows that aren't finite
  for (int64_t line = threadIdx.x / kQuad; line < args.lines; line += kLines) {
    const auto four = read<kQuad>(reinterpret_cast<const uint32_t*>(codes + line * kLine));
    const int64_t at = line * kDepth;
    float scale[kQuad];
    JAXTAP_UNROLL
    for (int c = 0; c < kQuad; ++c) {
      scale[c] = args.group == 0 ? 1.0f : scales[at / args.group * kCols + quad * kQuad + c];
    }
    JAXTAP_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= args.m) break;
      float part[kQuad] = {};
      JAXTAP_UNROLL
      for (int half = 0; half < kDepth / 4; ++half) {
        float numbers[4];
        const int64_t from = at + 4 * half;
        load<X>(x + r * args.k + from, args.k - from, args.wide, numbers);
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
      for (int step = kQuad; step < kWarp; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (threadIdx.x % kWarp < kQuad) of_warps[threadIdx.x / kWarp][r][quad * kQuad + c] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x >= kRows * kCols) return;
  const int row = static_cast<int>(threadIdx.x) / kCols, col = static_cast<int>(threadIdx.x) % kCols;
  const int64_t column = panel_index * kCols + col;
  if (first + row >= args.m || column >= args.n) return;
  float y = 0.0f;
  JAXTAP_UNROLL
  for (int w = 0; w < kWarps; ++w) y += of_warps[w][row][col];
  if (args.group == 0) y *= scales[col];
  const int64_t rest = args.n - panel_index * kCols;
  const int columns = static_cast<int>(rest < kCols ? rest : kCols);
  if (!fits(args, panel, columns)) y = std::numeric_limits<float>::quiet_NaN();
  store_one(args.y_dtype, args.y, (first + row) * args.n + column, y);
}

template <class X, int kBits>
void run(Args args, Stream stream) {
  constexpr int kRows = 4;
  const int64_t panels = panel_count(args.n);
  if (args.m == 1) {
    args.row_blocks = 1;
    launch(gemv_kernel<X, kBits, 1>, panels, kThreads, stream, args);
  } else {
    args.row_blocks = ceil_of(args.m, kRows);
    launch(gemv_kernel<X, kBits, kRows>, panels * args.row_blocks, kThreads, stream, args);
  }
}

template <class X>
void run(const Args& args, Stream stream) {
  if (args.bits == 8) {
    run<X, 8>(args, stream);
  } else {
    run<X, 4>(args, stream);
  }
}

}  // namespace

void gemv(const Gemv& given, Stream stream) {
  const PanelLayout layout = panel_layout(given.k, given.group, given.bits);
  Args args = {};
  args.x = given.x;
  args.weight = given.weight;
  args.y = given.y;
  args.y_dtype = given.y_dtype;
  args.m = given.m;
  args.k = given.k;
  args.n = given.n;
  args.group = given.group;
  args.panel_bytes = layout.panel_bytes();
  args.codes_offset = layout.codes_offset();
  args.lines = layout.codes_bytes() / kLine;
  args.bits = given.bits;
  args.wide = given.k % 4 == 0 &&
              aligned(given.x_dtype == te::Float::kF32 ? 16 : 8,
                      static_cast<const char*>(given.x));
  if (!aligned(16, given.weight)) {
    throw invalid_argument("the packed weight begins at an address that isn't a multiple of 16; "
                           "XLA's arrays do");
  }
  if (given.m == 0 || given.n == 0) return;
  switch (given.x_dtype) {
    case te::Float::kF32: return run<F32>(args, stream);
    case te::Float::kBF16: return run<BF16>(args, stream);
    case te::Float::kF16: return run<F16>(args, stream);
  }
}

}  // namespace jaxtap::cuda
