// What kernels are written with: CUDA, or where no CUDA compiler runs, threads of a block in
// software (emulator.h), for tests.
#pragma once

#include <cstdint>
#include <limits>

#include "common/error.h"
#include "cuda/runtime.h"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#define JAXTAP_UNROLL _Pragma("unroll")
#else
#include "cuda/emulator.h"
#define JAXTAP_UNROLL  // loops are as good
#endif

#if defined(JAXTAP_ON_DEVICE)
#include "cuda/tests/on_device.h"
#endif

#define JAXTAP_DEVICE static __device__ __forceinline__

namespace jaxtap::cuda {

constexpr int kWarp = 32;

inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether vectors of `bytes` bytes may be read at all these addresses.
template <typename... Pointers>
bool aligned(size_t bytes, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

// Returns CUDA's error code, 0 where it worked.
template <typename Args>
int start(void (*kernel)(Args), int64_t blocks, int threads, Stream stream, Args& args) {
#if defined(__CUDACC__)
  void* parameters[] = {&args};
  return static_cast<int>(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                       dim3(static_cast<unsigned>(threads)), parameters, 0, stream));
#else
  static_cast<void>(stream);
  emulator::run(static_cast<int>(blocks), threads, [&] { kernel(args); });
  return 0;
#endif
}

// Runs a kernel, whose one parameter is a struct, on `blocks` blocks of `threads` threads. Never
// waits for it, but in tests on a device. Nothing is run where there are no blocks.
template <typename Args>
void launch(void (*kernel)(Args), int64_t blocks, int threads, Stream stream, Args args) {
  if (blocks == 0) return;
  if (blocks > std::numeric_limits<int32_t>::max()) {
    throw invalid_argument("arrays are too large for one kernel, which would have ", blocks,
                           " blocks");
  }
#if defined(JAXTAP_ON_DEVICE)
  // Streams of tests are numbers that a runtime in memory gave: the device knows none of them.
  static_cast<void>(stream);
  __builtin_clear_padding(&args);  // which may hold parts of addresses
  on_device::launch(reinterpret_cast<const void*>(kernel), &args, sizeof(args),
                    [&] { return start(kernel, blocks, threads, nullptr, args); });
#else
  check_run(runtime(), start(kernel, blocks, threads, stream, args), "launching a kernel");
#endif
}

JAXTAP_DEVICE int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Of a number and NaN: the number.
JAXTAP_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
JAXTAP_DEVICE int larger(int a, int b) { return a > b ? a : b; }

// Over `width` neighbouring threads of a warp, all of which call this.
template <int width = kWarp, typename T>
JAXTAP_DEVICE T largest_of(T x) {
  JAXTAP_UNROLL
  for (int step = width / 2; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

JAXTAP_DEVICE float sum_of(float x) {
  JAXTAP_UNROLL
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Over a block of whole warps, all of whose threads call this. `scratch` has a number per warp.
template <typename T>
JAXTAP_DEVICE T largest_of_block(T x, T* scratch) {
  x = largest_of(x);
  __syncthreads();  // scratch may be in use from the last time
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  const unsigned warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  return largest_of(scratch[lane < warps ? lane : 0]);
}

JAXTAP_DEVICE float sum_of_block(float x, float* scratch) {
  x = sum_of(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  const unsigned warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  return sum_of(lane < warps ? scratch[lane] : 0.0f);
}

}  // namespace jaxtap::cuda
