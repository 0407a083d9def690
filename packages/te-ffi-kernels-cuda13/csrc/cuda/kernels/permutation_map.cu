// From a routing map to the rows of tokens: how many tokens each expert has, then where each
// token's row of it is, then the rows of each token together.
#include "cuda/kernels/permutation_token.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

JAXTAP_DEVICE int bits_in(unsigned bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// The sum over a block, all of whose threads call this.
JAXTAP_DEVICE int sum_of_all(int mine, int* total) {
  __syncthreads();
  if (threadIdx.x == 0) *total = 0;
  __syncthreads();
  if (mine != 0) atomicAdd(total, mine);
  __syncthreads();
  return *total;
}

// A block has an expert.
__global__ void __launch_bounds__(kThreads) row_counts_kernel(MakeRowMap args) {
  __shared__ int total;
  int mine = 0;
  for (int64_t token = threadIdx.x; token < args.tokens; token += kThreads) {
    mine += args.routed[token * args.experts + blockIdx.x] != 0;
  }
  const int found = sum_of_all(mine, &total);
  if (threadIdx.x == 0) args.counts[blockIdx.x] = found;
}

// A block has an expert. Rows go to where the experts of tokens will be.
__global__ void __launch_bounds__(kThreads) row_places_kernel(MakeRowMap args) {
  __shared__ int total;
  __shared__ int of_warps[kWarps];
  const int64_t expert = blockIdx.x, width = 2 * args.experts + 1;
  int before = 0;
  for (int64_t e = threadIdx.x; e < expert; e += kThreads) before += args.counts[e];
  int next = sum_of_all(before, &total);
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int64_t base = 0; base < args.tokens; base += kThreads) {
    const int64_t token = base + threadIdx.x;
    const bool routed =
        token < args.tokens && args.routed[token * args.experts + expert] != 0;
    const unsigned bits = __ballot_sync(~0u, routed);
    __syncthreads();  // of_warps may be in use from the last time
    if (lane == 0) of_warps[warp] = bits_in(bits);
    __syncthreads();
    int row = next + bits_in(bits & ((1u << lane) - 1));
    for (unsigned w = 0; w < kWarps; ++w) {
      if (w < warp) row += of_warps[w];
      next += of_warps[w];
    }
    if (token < args.tokens) {
      args.entries[token * width + args.experts + expert] = routed ? row : -1;
    }
  }
}

// A thread has a token.
__global__ void __launch_bounds__(kThreads) row_map_kernel(MakeRowMap args) {
  const int64_t token = thread_number(), experts = args.experts;
  if (token >= args.tokens) return;
  int32_t* mine = args.entries + token * (2 * experts + 1);
  int count = 0;
  for (int e = 0; e < experts; ++e) {
    const int32_t row = mine[experts + e];
    if (row < 0) continue;
    // Never beyond what was read.
    mine[count] = row;
    mine[experts + count++] = e;
  }
  for (int64_t i = count; i < experts; ++i) mine[i] = mine[experts + i] = -1;
  mine[2 * experts] = count;
}

}  // namespace

void make_row_map(const MakeRowMap& args, Stream stream) {
  launch(row_counts_kernel, args.experts, kThreads, stream, args);
  launch(row_places_kernel, args.experts, kThreads, stream, args);
  launch(row_map_kernel, ceil_of(args.tokens, kThreads), kThreads, stream, args);
}

}  // namespace jaxtap::cuda
