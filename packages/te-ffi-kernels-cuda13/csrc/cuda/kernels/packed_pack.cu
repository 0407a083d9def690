// A block has a panel, a thread every 256th word of it.
#include "cuda/kernels/packed.h"
#include "cuda/kernels/panels.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeaderWords = kPanelHeader / 4;

struct Args {
  PackedPack given;
  Panels weight;  // what is written
};

JAXTAP_DEVICE uint32_t sum_of_words(uint32_t x, uint32_t* scratch) {
  JAXTAP_UNROLL
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  uint32_t sum = 0;
  JAXTAP_UNROLL
  for (int w = 0; w < kThreads / kWarp; ++w) sum += scratch[w];
  return sum;
}

// Four bytes of a column: of 8 bits four rows, of 4 bits eight.
JAXTAP_DEVICE uint32_t codes_of(const PackedPack& given, int64_t line, int64_t column) {
  const int depth = given.bits == 8 ? 4 : 8;
  const int offset = given.bits == 8 ? 128 : 8;
  uint32_t out = 0;
  for (int i = 0; i < depth; ++i) {
    const int64_t row = line * depth + i;
    const bool there = row < given.k && column < given.n;
    const int code = (there ? given.codes[row * given.n + column] : 0) + offset;
    out |= given.bits == 8 ? static_cast<uint32_t>(code & 0xff) << (8 * i)
                           : static_cast<uint32_t>(code & 0xf) << (8 * (i % 4) + (i < 4 ? 0 : 4));
  }
  return out;
}

__global__ void packed_pack_kernel(Args args) {
  const PackedPack& given = args.given;
  const Panels& weight = args.weight;
  const int64_t index = blockIdx.x;
  auto* panel = reinterpret_cast<uint32_t*>(given.out + index * weight.bytes);
  uint32_t* payload = panel + kHeaderWords;
  const int64_t words = weight.bytes / 4 - kHeaderWords;
  const int64_t of_scales = weight.codes_offset / 4 - kHeaderWords;
  const auto* scales = reinterpret_cast<const uint32_t*>(given.scales);
  uint32_t plain = 0, weighted = 0;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) {
    const int64_t column = index * kCols + i % kCols;
    const uint32_t word = i >= of_scales          ? codes_of(given, (i - of_scales) / kCols, column)
                          : column < given.n ? scales[i / kCols * given.n + column]
                                             : 0;
    payload[i] = word;
    plain += word;
    weighted += static_cast<uint32_t>(i + 1) * word;
  }
  __shared__ uint32_t scratch[kThreads / kWarp];
  plain = sum_of_words(plain, scratch);
  weighted = sum_of_words(weighted, scratch);
  if (threadIdx.x != 0) return;
  uint32_t header[kHeaderWords] = {kMagic,
                                   panel_kind(given.bits, columns_of(weight, index)),
                                   static_cast<uint32_t>(given.k),
                                   static_cast<uint32_t>(given.group),
                                   plain,
                                   weighted};
  uint32_t sum = 0;
  JAXTAP_UNROLL
  for (int i = 0; i < 6; ++i) sum += header[i];
  header[6] = sum ^ kSalt;
  JAXTAP_UNROLL
  for (int i = 0; i < kHeaderWords; ++i) panel[i] = header[i];
}

}  // namespace

void packed_pack(const PackedPack& given, Stream stream) {
  const Args args = {given, panels_of(given.out, given.k, given.n, given.group, given.bits)};
  launch(packed_pack_kernel, args.weight.count, kThreads, stream, args);
}

}  // namespace jaxtap::cuda
