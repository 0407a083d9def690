// Rows that threads share: of a warp, or of a block. Which thread has which numbers depends on
// their count alone, so that sums of the same numbers have the same bits in every dtype.
#pragma once

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

// Runs the kernel for a row's length: Kernel::launch_of<kTeam, kValues>.
template <class Kernel, class Args>
void launch_rows(const Args& args, int64_t of_warp, int64_t of_block, Stream stream) {
  constexpr int kWarps = 4, kBlock = 256;
  const int64_t blocks = ceil_of(args.rows, kWarps);
  if (args.cols <= kRun * kWarp) {
    Kernel::template launch_of<kWarp, kRun>(args, blocks, kWarps * kWarp, stream);
  } else if (args.cols <= of_warp) {
    Kernel::template launch_of<kWarp, 32>(args, blocks, kWarps * kWarp, stream);
  } else if (args.cols <= of_block) {
    Kernel::template launch_of<kBlock, 32>(args, args.rows, kBlock, stream);
  } else {
    Kernel::template launch_of<2 * kBlock, 0>(args, args.rows, 2 * kBlock, stream);
  }
}

}  // namespace
}  // namespace jaxtap::cuda
