// How kernels share out arrays that they read once: threads have runs of numbers of a row.
#pragma once

#include "cuda/kernels/activation_source.h"

namespace jaxtap::cuda {
namespace {

constexpr int kRunThreads = 256;

template <class Source>
struct RunsOf {
  Source source;
  void* out;
  int* absmax;  // bits, to which the largest magnitude is added; nullptr where it isn't wanted
  int64_t rows, cols, runs;  // runs of a row
  bool wide;
};

// For `cols` columns of each row.
template <class Source>
RunsOf<Source> runs_args(const Activation& given, const Quantize& outputs, const Source& source,
                         int64_t cols) {
  constexpr int kCount = kWide<typename Source::Format>;
  RunsOf<Source> args = {};
  args.source = source;
  args.out = outputs.out;
  if (outputs.wants_absmax) args.absmax = reinterpret_cast<int*>(outputs.updated_amax);
  args.rows = given.rows;
  args.cols = cols;
  args.runs = ceil_of(cols, kCount);
  args.wide = source.wide(kCount) && aligned(16, static_cast<char*>(outputs.out));
  return args;
}

struct RunPlace {
  int64_t row, run;  // the run of the row
};

// Of a thread. Division of 64 bits takes longer than what is left to do.
JAXTAP_DEVICE RunPlace run_place(int64_t runs) {
  const int64_t at = thread_number();
  if ((at | runs) >> 32 != 0) return {at / runs, at % runs};
  const auto one = static_cast<uint32_t>(at), other = static_cast<uint32_t>(runs);
  return {one / other, one % other};
}

// Adds to the largest magnitude. All threads of the block call this.
JAXTAP_DEVICE void add_absmax(int* absmax, int most, int* scratch) {
  if (absmax == nullptr) return;
  most = largest_of_block(most, scratch);
  if (threadIdx.x == 0) atomicMax(absmax, most);
}

}  // namespace
}  // namespace jaxtap::cuda
