// A block has a tile of 64 lanes and 64 quantized values of each, a thread 4 x 4 of them.
#include "cuda/formats.h"
#include "cuda/kernels/gemm.h"

namespace jaxtap::cuda {
namespace {

constexpr int kTile = 64, kPart = 4;
constexpr int kParts = kTile / kPart;
constexpr int kThreads = kParts * kParts;

struct Args {
  GemmArrange given;
  int64_t tiles_across;  // along k
  bool wide;             // rows of quantized values may be read in words
};

// Four quantized values of a row from `at` on, the first in the lowest byte; zeros beyond the row's
// end.
JAXTAP_DEVICE uint32_t read_four(const uint8_t* row, int64_t at, int64_t end, bool wide) {
  if (wide && at + kPart <= end) return *reinterpret_cast<const uint32_t*>(row + at);
  uint32_t out = 0;
  JAXTAP_UNROLL
  for (int i = 0; i < kPart; ++i) {
    if (at + i < end) out |= static_cast<uint32_t>(row[at + i]) << (8 * i);
  }
  return out;
}

JAXTAP_DEVICE void write_four(const GemmArrange& given, int64_t lane, int64_t k, uint32_t four) {
  if (lane < given.out_lanes && k < given.out_k) {
    *reinterpret_cast<uint32_t*>(given.out + lane * given.out_k + k) = four;
  }
}

template <bool kLanesFirst>
__global__ void gemm_transpose_kernel(Args args) {
  const GemmArrange& given = args.given;
  const int64_t lane = static_cast<int64_t>(blockIdx.x) / args.tiles_across * kTile;
  const int64_t k = static_cast<int64_t>(blockIdx.x) % args.tiles_across * kTile;
  const int down = static_cast<int>(threadIdx.x) / kParts;
  const int across = static_cast<int>(threadIdx.x) % kParts;
  const int64_t rows = kLanesFirst ? given.lanes : given.k;
  const int64_t cols = kLanesFirst ? given.k : given.lanes;
  const int64_t row = (kLanesFirst ? lane : k) + down * kPart;
  const int64_t col = (kLanesFirst ? k : lane) + across * kPart;
  uint32_t four[kPart];
  JAXTAP_UNROLL
  for (int i = 0; i < kPart; ++i) {
    const bool inside = row + i < rows;
    four[i] = inside ? read_four(given.qvalues + (row + i) * cols, col, cols, args.wide) : 0;
  }
  if constexpr (kLanesFirst) {
    JAXTAP_UNROLL
    for (int i = 0; i < kPart; ++i) write_four(given, row + i, col, four[i]);
  } else {
    __shared__ uint32_t colwise[kTile][kParts + 1];
    JAXTAP_UNROLL
    for (int j = 0; j < kPart; ++j) {
      uint32_t column = 0;
      JAXTAP_UNROLL
      for (int i = 0; i < kPart; ++i) column |= (four[i] >> (8 * j) & 0xffu) << (8 * i);
      colwise[across * kPart + j][down] = column;
    }
    __syncthreads();
    JAXTAP_UNROLL
    for (int s = 0; s < kTile; s += kParts) {
      write_four(given, lane + s + down, k + across * kPart, colwise[s + down][across]);
    }
  }
}

}  // namespace

void transpose_and_pad(const GemmArrange& given, Stream stream) {
  const int64_t row = given.k_is_last ? given.k : given.lanes;
  const Args args = {given, ceil_of(given.out_k, kTile),
                     row % kPart == 0 && aligned(kPart, given.qvalues)};
  const int64_t blocks = ceil_of(given.out_lanes, kTile) * args.tiles_across;
  if (given.k_is_last) {
    launch(gemm_transpose_kernel<true>, blocks, kThreads, stream, args);
  } else {
    launch(gemm_transpose_kernel<false>, blocks, kThreads, stream, args);
  }
}

}  // namespace jaxtap::cuda
