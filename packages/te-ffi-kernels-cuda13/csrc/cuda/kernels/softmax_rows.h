// What the softmax kernels know of a row.
#pragma once

#include "cuda/formats.h"
#include "cuda/kernels/softmax.h"

namespace jaxtap::cuda {
namespace {

constexpr float kNone = -__builtin_inff();
constexpr int kWarpThreads = 128, kBlockThreads = 512;
// Rows of up to this many numbers are each in the registers of one warp.
constexpr int64_t kSoftmaxOfWarp = 1024;

struct SoftmaxArgs {
  const void* x;        // logits, or the gradient of the result
  const void* softmax;  // the result, of the backward pass
  const uint8_t* mask;
  void* out;
  int64_t rows, rows_of_mask, q, k, masks;  // rows that have the same mask, heads * q
  float scale;
  bool causal, wide;

  __host__ __device__ int64_t columns(int64_t row) const {
    if (!causal) return k;
    const int64_t up_to = row % q + 1;
    return up_to < k ? up_to : k;
  }

  __host__ __device__ const uint8_t* mask_of(int64_t row) const {
    if (mask == nullptr) return nullptr;
    return mask + (row / rows_of_mask % masks * q + row % q) * k;
  }
};

inline SoftmaxArgs softmax_args(const SoftmaxShape& shape) {
  SoftmaxArgs args = {};
  args.q = shape.q;
  args.k = shape.k;
  args.rows = shape.k == 0 ? 0 : shape.batch * shape.heads * shape.q;
  args.rows_of_mask = shape.heads * shape.q;
  args.masks = 1;
  args.causal = shape.causal;
  return args;
}

inline int64_t wide_of(te::Float dtype) { return dtype == te::Float::kF32 ? 4 : 8; }

inline SoftmaxArgs softmax_args(const SoftmaxForward& given) {
  SoftmaxArgs args = softmax_args(given.shape);
  args.x = given.x;
  args.mask = given.mask;
  args.masks = given.masks;
  args.out = given.out;
  args.scale = given.scale;
  const int64_t wide = wide_of(given.shape.dtype);
  args.wide = args.k % wide == 0 &&
              aligned(16, static_cast<const char*>(given.x), static_cast<char*>(given.out)) &&
              aligned(static_cast<size_t>(wide), given.mask);
  return args;
}

inline SoftmaxArgs softmax_args(const SoftmaxBackward& given) {
  SoftmaxArgs args = softmax_args(given.shape);
  args.x = given.grad;
  args.softmax = given.softmax;
  args.out = given.out;
  args.scale = given.scale;
  args.wide = args.k % wide_of(given.shape.dtype) == 0 &&
              aligned(16, static_cast<const char*>(given.grad),
                      static_cast<const char*>(given.softmax), static_cast<char*>(given.out));
  return args;
}

// Which of kCount numbers of a row from `at` on are left out, as bits: beyond the row's columns, or
// where the mask is 1.
template <int kCount>
JAXTAP_DEVICE uint32_t left_out(const uint8_t* mask, int64_t at, int64_t columns, bool wide) {
  uint32_t out = 0;
  if (mask != nullptr && wide && at + kCount <= columns) {
    const auto bytes = read<kCount>(mask + at);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) out |= static_cast<uint32_t>(bytes.at[i] == 1) << i;
  } else {
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const bool gone = at + i >= columns || (mask != nullptr && mask[at + i] == 1);
      out |= static_cast<uint32_t>(gone) << i;
    }
  }
  return out;
}

// A row without anything left has the sum 0, and all its numbers are zeros.
JAXTAP_DEVICE float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// With a kernel of 8 or of 32 numbers in each thread of a warp, or with one of whole blocks.
inline void run_rows(const SoftmaxArgs& args, void (*few)(SoftmaxArgs), void (*some)(SoftmaxArgs),
                     void (*many)(SoftmaxArgs), Stream stream) {
  if (args.k > kSoftmaxOfWarp) return launch(many, args.rows, kBlockThreads, stream, args);
  const int64_t blocks = ceil_of(args.rows, kWarpThreads / kWarp);
  launch(args.k <= 8 * kWarp ? few : some, blocks, kWarpThreads, stream, args);
}

}  // namespace
}  // namespace jaxtap::cuda
