// Rows that threads share: of a warp, or of a block. Which thread has which numbers depends on
// their count alone, so that sums of the same numbers have the same bits in every dtype.
#pragma once

#include <type_traits>

#include "cuda/formats.h"

namespace jaxtap::cuda {
namespace {

// Numbers in a thread that follow each other.
constexpr int kRun = 8;

// Over kTeam threads, a warp or a whole block, all of which call this. `scratch` has a number per
// warp.
template <int kTeam>
JAXTAP_DEVICE float sum_of_team(float x, float* scratch) {
  if constexpr (kTeam == kWarp) {
    return sum_of(x);
  } else {
    return sum_of_block(x, scratch);
  }
}

// A row of each of kArrays arrays, kValues numbers of it in the registers of each thread; with
// kValues = 0 they are read each time.
template <class Format, int kTeam, int kValues, int kArrays>
class Rows {
 public:
  using Type = typename Format::Type;
  using Numbers = float[kArrays][kRun];

  __device__ __forceinline__ Rows(const Type* const (&from)[kArrays], int64_t cols, bool wide)
      : cols_(cols), wide_(wide) {
    JAXTAP_UNROLL
    for (int a = 0; a < kArrays; ++a) from_[a] = from[a];
    if constexpr (kValues != 0) {
      JAXTAP_UNROLL
      for (int c = 0; c < kRuns; ++c) fetch(place(c), held_[c]);
    }
  }

  // Calls body(at, numbers) for runs of numbers from `at` on; zeros are beyond the row.
  template <class Body>
  __device__ __forceinline__ void each(Body&& body) const {
    if constexpr (kValues != 0) {
      JAXTAP_UNROLL
      for (int c = 0; c < kRuns; ++c) body(place(c), held_[c]);
    } else {
      for (int64_t c = 0; place(c) < cols_; ++c) {
        Numbers numbers;
        fetch(place(c), numbers);
        body(place(c), numbers);
      }
    }
  }

 private:
  static constexpr int kRuns = kValues == 0 ? 1 : kValues / kRun;

  __device__ __forceinline__ int64_t place(int64_t run) const {
    return (run * kTeam + threadIdx.x % kTeam) * kRun;
  }

  __device__ __forceinline__ void fetch(int64_t at, Numbers& to) const {
    JAXTAP_UNROLL
    for (int a = 0; a < kArrays; ++a) load<Format>(from_[a] + at, cols_ - at, wide_, to[a]);
  }

  const Type* from_[kArrays];
  int64_t cols_;
  bool wide_;
  float held_[kRuns][kArrays][kRun];
};

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Runs the kernel for a row's length, which is `kernel(team, values)`: of so many threads, with so
// many numbers in each.
template <class Args, class Kernel>
void launch_rows(const Args& args, int64_t of_warp, int64_t of_block, Stream stream,
                 const Kernel& kernel) {
  constexpr int kWarps = 4, kBlock = 256;
  const int64_t warps = ceil_of(args.rows, kWarps);
  const auto run = [&](auto team, auto values, int64_t blocks, int threads) {
    launch(kernel(team, values), blocks, threads, stream, args);
  };
  if (args.cols <= kRun * kWarp) {
    run(Int<kWarp>(), Int<kRun>(), warps, kWarps * kWarp);
  } else if (args.cols <= of_warp) {
    run(Int<kWarp>(), Int<32>(), warps, kWarps * kWarp);
  } else if (args.cols <= of_block) {
    run(Int<kBlock>(), Int<32>(), args.rows, kBlock);
  } else {
    run(Int<2 * kBlock>(), Int<0>(), args.rows, 2 * kBlock);
  }
}

}  // namespace
}  // namespace jaxtap::cuda
