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
template <int kBits>
JAXTAP_DEVICE uint32_t values_of(const Args& args, int64_t line, int64_t column) {
  constexpr int kOffset = 1 << (kBits - 1);
  const Panels& weight = args.weight;
  uint32_t out = 0;
  for (int i = 0; i < kDepthOf<kBits>; ++i) {
    const int64_t row = line * kDepthOf<kBits> + i;
    const bool there = row < weight.k && column < weight.n;
    const int qvalue = (there ? args.given.qvalues[row * weight.n + column] : 0) + kOffset;
    out |= kBits == 8 ? static_cast<uint32_t>(qvalue & 0xff) << (8 * i)
                      : static_cast<uint32_t>(qvalue & 0xf) << (8 * (i % 4) + (i < 4 ? 0 : 4));
  }
  return out;
}

// The bits of a scale; zero beyond the last column.
JAXTAP_DEVICE uint32_t scale_bits_of(const Args& args, int64_t group, int64_t column) {
  const Panels& weight = args.weight;
  const int64_t at = group * weight.n + column;
  if (column >= weight.n) return 0;
  return weight.scale_bits == 32 ? static_cast<const uint32_t*>(args.given.scales)[at]
                                 : static_cast<const uint16_t*>(args.given.scales)[at];
}

// A word of the payload, which is one part, or in 4 bits one for each group: scales, then quantized
// values.
template <int kBits>
JAXTAP_DEVICE uint32_t word_of(const Args& args, int64_t words, int64_t first, int64_t i) {
  const Panels& weight = args.weight;
  const int64_t parts = kBits == 8 ? 1 : weight.groups;
  const int64_t of_scales = weight.groups / parts * weight.scale_bytes / 4;
  const int64_t part = i / (words / parts), at = i % (words / parts), place = at - of_scales;
  if (place >= 0) {
    return values_of<kBits>(args, part * weight.group_lines + place / kColsOf<kBits>,
                           first + place % kColsOf<kBits>);
  }
  if (weight.scale_bits == 32) {
    return scale_bits_of(args, part + at / kColsOf<kBits>, first + at % kColsOf<kBits>);
  }
  return scale_bits_of(args, part, first + 2 * at) |
         scale_bits_of(args, part, first + 2 * at + 1) << 16;
}

template <int kBits>
__global__ void packed_pack_kernel(Args args) {
  const Panels& weight = args.weight;
  const int64_t index = blockIdx.x;
  auto* panel = reinterpret_cast<uint32_t*>(args.given.out + index * weight.bytes);
  uint32_t* payload = panel + kHeaderWords;
  const int64_t words = weight.bytes / 4 - kHeaderWords;
  uint32_t plain = 0, weighted = 0;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) {
    const uint32_t word = word_of<kBits>(args, words, index * kColsOf<kBits>, i);
    payload[i] = word;
    plain += word;
    weighted += static_cast<uint32_t>(i + 1) * word;
  }
  __shared__ uint32_t scratch[kThreads / kWarp];
  plain = sum_of_words(plain, scratch);
  weighted = sum_of_words(weighted, scratch);
  if (threadIdx.x != 0) return;
  uint32_t header[kHeaderWords] = {kMagic,
                                   panel_kind(weight, index),
                                   static_cast<uint32_t>(weight.k),
                                   static_cast<uint32_t>(weight.group),
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
  const Args args = {given, panels_of(given.out, given.layout, given.n)};
  const auto kernel = given.layout.bits == 8 ? packed_pack_kernel<8> : packed_pack_kernel<4>;
  launch(kernel, args.weight.count, kThreads, stream, args);
}

}  // namespace jaxtap::cuda
