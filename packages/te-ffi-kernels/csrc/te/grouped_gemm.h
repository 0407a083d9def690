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
  // Of one group. Addresses are those of all groups. What is divided has the size `length` here,
  // and alpha isn't used.
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

namespace grouped_detail {

// Moves a factor to a group: by so many numbers, the group's lanes being `lanes` after the first.
inline void move(Factor& factor, Scaling scaling, int64_t index, int64_t by, int64_t lanes) {
  factor.data =
      static_cast<const char*>(factor.data) + by * static_cast<int64_t>(byte_size(factor.dtype));
  if (scaling == Scaling::kNone) return;
  const int64_t bytes = scaling == Scaling::kMx        ? by / kBlock
                        : scaling == Scaling::kChannel ? 4 * lanes
                                                       : 4 * index;
  factor.scales = static_cast<const char*>(factor.scales) + bytes;
}

}  // namespace grouped_detail

inline Gemm GroupedGemm::group(int64_t index, int64_t start, int64_t size) const {
  Gemm one = each;
  int64_t lhs_lanes = index * each.m, out = index * each.m * each.n;
  int64_t lhs = start * each.m, rhs = start * each.n;
  if (ragged == Ragged::kRows) {
    one.m = size;
    lhs_lanes = start;
    lhs = start * each.k;
    rhs = index * each.n * each.k;
    out = start * each.n;
  } else {
    one.k = size;
  }
  grouped_detail::move(one.lhs, each.scaling, index, lhs, lhs_lanes);
  grouped_detail::move(one.rhs, each.scaling, index, rhs, index * each.n);
  one.out = static_cast<char*>(each.out) + out * bytes_of(each.out_dtype);
  if (each.bias != nullptr) {
    one.bias = static_cast<const char*>(each.bias) + index * each.n * bytes_of(each.out_dtype);
  }
  return one;
}

inline GroupedGemm::Rest GroupedGemm::rest(int64_t start) const {
  if (ragged != Ragged::kRows) return {};
  const int64_t row = each.n * bytes_of(each.out_dtype);
  return {static_cast<char*>(each.out) + start * row, static_cast<size_t>((length - start) * row)};
}

// Throws for sizes that are negative, that sum up to more than `length`, or that cut MX blocks.
// Returns the sum.
inline int64_t check_group_sizes(const GroupedGemm& args, const int32_t* sizes) {
  const bool blocks = args.each.scaling == Scaling::kMx && args.ragged == Ragged::kDepth;
  int64_t sum = 0;
  for (int64_t i = 0; i < args.groups; ++i) {
    if (sizes[i] < 0) {
      throw invalid_argument("group_sizes[", i, "] must be at least 0, got ", sizes[i]);
    }
    if (blocks && sizes[i] % kBlock != 0) {
      throw invalid_argument("group_sizes[", i, "] must be a multiple of 32 for MX blocks, got ",
                             sizes[i]);
    }
    sum += sizes[i];
  }
  if (sum > args.length) {
    throw invalid_argument("the sum of group_sizes must be at most ", args.length, ", the size of "
                           "the axis that is divided, got ", sum);
  }
  return sum;
}

// alpha has one for each group. Rows of the result that no group has become zero.
void grouped_gemm(const GroupedGemm& args, const int32_t* sizes, const float* alpha,
                  const Parallel& parallel);

}  // namespace jaxtap::te
