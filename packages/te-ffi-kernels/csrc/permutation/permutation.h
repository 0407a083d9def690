// Moving the tokens of a mixture of experts to the rows of their experts, and back.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "te/table.h"

namespace jaxtap::permutation {

// To which rows tokens go: for each token up to `experts` rows, as many experts, and how many of
// both count. Rows of an expert follow each other, in the order of tokens.
struct RowMap {
  const int32_t* entries = nullptr;      // [tokens, 2 * experts + 1]
  const int32_t* pad_offsets = nullptr;  // [experts]: what is added to rows of each; nullptr: 0
  int64_t tokens = 0, experts = 0;
  int64_t rows = 0;  // that there are; others are left out

  // Calls body(row, expert) for the rows of a token.
  template <class Body>
  void each(int64_t token, Body&& body) const {
    const int32_t* mine = entries + token * (2 * experts + 1);
    const int64_t count = mine[2 * experts] < experts ? mine[2 * experts] : experts;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t expert = mine[experts + i];
      if (expert < 0 || expert >= experts) continue;
      const int64_t row =
          mine[i] + (pad_offsets == nullptr ? 0 : static_cast<int64_t>(pad_offsets[expert]));
      if (row >= 0 && row < rows) body(row, expert);
    }
  }
};

// From a routing map, bytes [tokens, experts]: the entries of a RowMap, and how many tokens each
// expert has.
struct MakeRowMap {
  const uint8_t* routed = nullptr;
  int64_t tokens = 0, experts = 0;
  int32_t* entries = nullptr;
  int32_t* counts = nullptr;  // [experts]
};

// Rows get the numbers of their tokens, and zeros where they have none.
struct Permute {
  RowMap map;
  const void* x = nullptr;  // [tokens, row_bytes]
  int64_t row_bytes = 0;
  void* out = nullptr;            // [rows, row_bytes]
  const void* probs = nullptr;    // [tokens, experts] of prob_bytes, or none
  void* permuted_probs = nullptr;  // [rows]
  int64_t prob_bytes = 0;
};

// Tokens get the sums of their rows.
struct Unpermute {
  RowMap map;
  const void* x = nullptr;  // [rows, cols]
  te::Float dtype = te::Float::kF32;
  int64_t cols = 0;
  const float* factors = nullptr;  // [tokens, experts], or none: what each row is multiplied with
  void* out = nullptr;             // [tokens, cols], as x
  const void* permuted_probs = nullptr;  // [rows] of prob_bytes, or none
  void* probs = nullptr;                 // [tokens, experts], zero where a token has no row
  int64_t prob_bytes = 0;
};

// The gradient of Unpermute with factors.
struct UnpermuteGradient {
  RowMap map;
  const void* grad = nullptr;  // [tokens, cols]
  const void* x = nullptr;     // [rows, cols], of the same dtype
  te::Float dtype = te::Float::kF32;
  int64_t cols = 0;
  const float* factors = nullptr;
  void* x_grad = nullptr;          // [rows, cols]
  float* factors_grad = nullptr;  // [tokens, experts]
};

void make_row_map(const MakeRowMap& args, const Parallel& parallel);
void permute(const Permute& args, const Parallel& parallel);
void unpermute(const Unpermute& args, const Parallel& parallel);
void unpermute_gradient(const UnpermuteGradient& args, const Parallel& parallel);

}  // namespace jaxtap::permutation
