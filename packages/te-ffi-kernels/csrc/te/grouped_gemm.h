// Matmuls of groups: each group has its part of an axis of lhs, and its own matrix of rhs or of the
// result. How much of the axis a group has is known when the matmul runs.
#pragma once

#include <cstdint>

#include "te/gemm.h"

namespace jaxtap::te {

// Which axis of lhs is divided.
enum class Ragged : int64_t {
  kRows = 0,   // that of the result's rows: lhs [length, k], rhs [groups, k, n], out [length, n]
  kDepth = 1,  // that which is summed over: lhs [length, m], rhs [length, n], out [groups, m, n]
};

// Groups follow each other, each a matrix without gaps, in whichever order its two axes are.
struct GroupedGemm {
  // Of one group. Addresses are those of all groups. What is divided has the size `length` here, and
  // alpha isn't used.
  Gemm each;
  Ragged ragged = Ragged::kRows;
  int64_t groups = 0;
  int64_t length = 0;  // of the axis that is divided; its end may belong to no group

  // What a group has of it, from `start` on.
  Gemm group(int64_t index, int64_t start, int64_t size) const;

  // The result's rows from `start` on, which no group has.
  struct Rest {
    void* at = nullptr;
    size_t bytes = 0;
  };
  Rest rest(int64_t start) const;
};

// Throws for sizes that are negative, that sum up to more than `length`, or that cut MX blocks.
// Returns the sum.
int64_t check_group_sizes(const GroupedGemm& args, const int32_t* sizes);

// alpha has one for each group. Rows of the result that no group has become zero.
void grouped_gemm(const GroupedGemm& args, const int32_t* sizes, const float* alpha,
                  const Parallel& parallel);

}  // namespace jaxtap::te
