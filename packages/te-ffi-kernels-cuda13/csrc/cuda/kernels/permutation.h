// Moving the tokens of a mixture of experts to the rows of their experts, and back.
#pragma once

#include "common/dtype.h"
#include "cuda/runtime.h"
#include "permutation/permutation.h"

namespace jaxtap::cuda {

using permutation::MakeRowMap;
using permutation::Permute;

// As the CPU's, but that probabilities have their dtype. Results that are given are zero but where
// the kernels write: the caller clears them.
struct Unpermute : permutation::Unpermute {
  const void* given_factors = nullptr;  // in place of `factors`
  te::Float factors_dtype = te::Float::kF32;
};

struct UnpermuteGradient : permutation::UnpermuteGradient {
  const void* given_factors = nullptr;
  te::Float factors_dtype = te::Float::kF32;
  void* given_factors_grad = nullptr;  // in place of `factors_grad`
};

void make_row_map(const MakeRowMap& args, Stream stream);
void permute(const Permute& args, Stream stream);
void unpermute(const Unpermute& args, Stream stream);
void unpermute_gradient(const UnpermuteGradient& args, Stream stream);

}  // namespace jaxtap::cuda
