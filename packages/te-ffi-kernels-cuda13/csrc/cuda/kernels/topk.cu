// A block has a row. Four passes over its numbers find the bits of the last one that is among the
// largest, eight at once, by how many numbers have which; one more takes those that are above it,
// and as many of the same as there is room for, the lower indices first. Then they're ordered.
#include "cuda/kernels/router_order.h"
#include "cuda/kernels/topk.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kDigit = 8, kDigits = 1 << kDigit;

// How many of a block's flags threads before this one have, and in `all` how many all have. All
// threads call this.
JAXTAP_DEVICE int flags_before(bool flag, int (&of_warps)[kWarps], int* all) {
  const unsigned bits = __ballot_sync(~0u, flag), lane = threadIdx.x % kWarp;
  const auto count = [](unsigned some) {
#if defined(__CUDA_ARCH__)
    return __popc(some);
#else
    return __builtin_popcount(some);
#endif
  };
  __syncthreads();  // of_warps may be in use from the last time
  if (lane == 0) of_warps[threadIdx.x / kWarp] = count(bits);
  __syncthreads();
  int before = count(bits & ((1u << lane) - 1)), total = 0;
  for (unsigned w = 0; w < kWarps; ++w) {
    if (w < threadIdx.x / kWarp) before += of_warps[w];
    total += of_warps[w];
  }
  *all = total;
  return before;
}

// Bits in whose order the numbers are. Those of 16 bits are not made float32 for it: GPUs then
// forget the sign of NaN, by which it is the first or the last.
JAXTAP_DEVICE uint32_t bits_in_32(uint16_t half) { return static_cast<uint32_t>(half) << 16; }
JAXTAP_DEVICE uint32_t bits_in_32(float number) { return float_bits(number); }

template <class Format>
__global__ void __launch_bounds__(kThreads) topk_kernel(TopK args) {
  __shared__ int counts[kDigits], of_warps[kWarps];
  __shared__ int found_digit, found_above;
  __shared__ Ranked best[kMostTopK];
  const int64_t row = blockIdx.x;
  const auto* keys = static_cast<const typename Format::Type*>(args.keys) + row * args.cols;
  // In the order of unsigned integers.
  const auto bits_of = [&](int64_t at) {
    return static_cast<uint32_t>(bits_and_keys(static_cast<int>(bits_in_32(keys[at])))) ^ 0x80000000u;
  };

  uint32_t last = 0, known = 0;
  int left = static_cast<int>(args.k);  // of those whose known bits are those of the last one
  for (int shift = 32 - kDigit; shift >= 0; shift -= kDigit) {
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t at = threadIdx.x; at < args.cols; at += kThreads) {
      const uint32_t bits = bits_of(at);
      if ((bits & known) == last) atomicAdd(&counts[bits >> shift & (kDigits - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1, above = 0;
      while (above + counts[digit] < left) above += counts[digit--];
      found_digit = digit;
      found_above = above;
    }
    __syncthreads();
    last |= static_cast<uint32_t>(found_digit) << shift;
    known |= static_cast<uint32_t>(kDigits - 1) << shift;
    left -= found_above;
    __syncthreads();  // before the next pass writes them
  }

  const int k = static_cast<int>(args.k), above = k - left;
  int larger_before = 0, same_before = 0;
  for (int64_t base = 0; base < args.cols; base += kThreads) {
    const int64_t at = base + threadIdx.x;
    const uint32_t bits = at < args.cols ? bits_of(at) : 0;
    const bool larger = at < args.cols && bits > last, same = at < args.cols && bits == last;
    int all_larger = 0, all_same = 0;
    const int place = larger_before + flags_before(larger, of_warps, &all_larger);
    const int place_of_same = same_before + flags_before(same, of_warps, &all_same);
    const Ranked mine = {static_cast<int>(bits ^ 0x80000000u), static_cast<int>(at)};
    if (larger) best[place] = mine;
    if (same && place_of_same < left) best[above + place_of_same] = mine;
    larger_before += all_larger;
    same_before += all_same;
  }
  __syncthreads();
  auto* values = static_cast<typename Format::Type*>(args.values) + row * args.k;
  for (int i = threadIdx.x; i < k; i += kThreads) {
    const Ranked mine = best[i];
    int place = 0;
    for (int j = 0; j < k; ++j) place += is_before(best[j], mine);
    values[place] = keys[mine.at];
    args.indices[row * args.k + place] = mine.at;
  }
}

}  // namespace

void topk(const TopK& args, Stream stream) {
  if (args.k > kMostTopK) {
    throw invalid_argument("k_value must be at most ", kMostTopK, ", got ", args.k);
  }
  const auto with = [&](auto kernel) { launch(kernel, args.rows, kThreads, stream, args); };
  by_float(args.dtype, [&](auto of) { with(topk_kernel<decltype(of)>); });
}

}  // namespace jaxtap::cuda
