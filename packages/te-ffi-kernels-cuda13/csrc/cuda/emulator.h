// Kernels without a GPU, for tests of what they compute: the threads of a block are fibers of one
// thread, which take turns at barriers; blocks come one after the other. Reads and writes are those
// of the host, so sanitizers see them. Waiting at barriers that not all reach is an error, and so
// is any other order of threads that a kernel relies on: it changes from barrier to barrier.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__ __restrict

namespace jaxtap::cuda::emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Calls `thread` for each thread of each block.
void run(int blocks, int threads, const std::function<void()>& thread);

// Waits for all threads of the block.
void block_barrier();

// Shows words, at most 8, to the warp, of which `warp_exchanged` returns those of another thread
// until the next time.
void warp_exchange(const uint32_t* words, int count);
const uint32_t* warp_exchanged(int lane);

extern Index thread_index, block_index, block_size, grid_size;

}  // namespace jaxtap::cuda::emulator

// The names that CUDA gives them.
#define threadIdx ::jaxtap::cuda::emulator::thread_index
#define blockIdx ::jaxtap::cuda::emulator::block_index
#define blockDim ::jaxtap::cuda::emulator::block_size
#define gridDim ::jaxtap::cuda::emulator::grid_size

inline void __syncthreads() { ::jaxtap::cuda::emulator::block_barrier(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  static_assert(sizeof(T) == 4, "of 4 bytes");
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  ::jaxtap::cuda::emulator::warp_exchange(&bits, 1);
  bits = *::jaxtap::cuda::emulator::warp_exchanged(static_cast<int>(threadIdx.x % 32) ^ lanes);
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline void __syncwarp() { ::jaxtap::cuda::emulator::warp_exchange(nullptr, 0); }

inline unsigned __ballot_sync(unsigned, int condition) {
  unsigned bits = static_cast<unsigned>(condition != 0) << (threadIdx.x % 32);
  for (int step = 1; step < 32; step *= 2) bits |= __shfl_xor_sync(~0u, bits, step);
  return bits;
}

inline int atomicMax(int* at, int value) {
  const int before = *at;
  if (value > before) *at = value;
  return before;
}

inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}
