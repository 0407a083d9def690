#include "te/grouped_gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace jaxtap::te {
namespace {

int64_t bytes_of(Float dtype) { return dtype == Float::kF32 ? 4 : 2; }

// Moves a factor to a group: by so many numbers, the group's lanes being `lanes` after the first.
void move(Factor& factor, Scaling scaling, int64_t index, int64_t by, int64_t lanes) {
  factor.data =
      static_cast<const char*>(factor.data) + by * static_cast<int64_t>(byte_size(factor.dtype));
  if (scaling == Scaling::kNone) return;
  const int64_t bytes = scaling == Scaling::kMx        ? by / kBlock
                        : scaling == Scaling::kChannel ? 4 * lanes
                                                       : 4 * index;
  factor.scales = static_cast<const char*>(factor.scales) + bytes;
}

}  // namespace

Gemm GroupedGemm::group(int64_t index, int64_t start, int64_t size) const {
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
  move(one.lhs, each.scaling, index, lhs, lhs_lanes);
  move(one.rhs, each.scaling, index, rhs, index * each.n);
  one.out = static_cast<char*>(each.out) + out * bytes_of(each.out_dtype);
  if (each.bias != nullptr) {
    one.bias = static_cast<const char*>(each.bias) + index * each.n * bytes_of(each.out_dtype);
  }
  return one;
}

GroupedGemm::Rest GroupedGemm::rest(int64_t start) const {
  if (ragged != Ragged::kRows) return {};
  const int64_t row = each.n * bytes_of(each.out_dtype);
  return {static_cast<char*>(each.out) + start * row, static_cast<size_t>((length - start) * row)};
}

int64_t check_group_sizes(const GroupedGemm& args, const int32_t* sizes) {
  const bool blocks = args.each.scaling == Scaling::kMx && args.ragged == Ragged::kDepth;
  int64_t sum = 0;
  for (int64_t i = 0; i < args.groups; ++i) {
    if (sizes[i] < 0) {
      throw invalid_argument("group_sizes[", i, "] is ", sizes[i], ", and must be at least 0");
    }
    if (blocks && sizes[i] % kBlock != 0) {
      throw invalid_argument("group_sizes[", i, "] is ", sizes[i],
                             "; MX blocks along the contracted axis need a multiple of 32");
    }
    sum += sizes[i];
  }
  if (sum > args.length) {
    throw invalid_argument("group_sizes has the sum ", sum, ", and must have at most ", args.length,
                           ", the size of the axis that is divided");
  }
  return sum;
}

void grouped_gemm(const GroupedGemm& args, const int32_t* sizes, const float* alpha,
                  const Parallel& parallel) {
  const GroupedGemm::Rest rest = args.rest(check_group_sizes(args, sizes));
  if (rest.bytes != 0) std::memset(rest.at, 0, rest.bytes);
  std::vector<Gemm> groups;
  int64_t start = 0, largest = 0, total = 0;
  for (int64_t i = 0; i < args.groups; ++i) {
    Gemm one = args.group(i, start, sizes[i]);
    start += sizes[i];
    if (one.m == 0) continue;
    one.alpha = alpha[i];
    groups.push_back(one);
    largest = std::max<int64_t>(largest, sizes[i]);
    total += sizes[i];
  }
  const auto count = static_cast<int64_t>(groups.size());
  // A thread takes whole groups where none is left with a large one in the end.
  if (count >= 2 * parallel.threads() && largest * parallel.threads() <= total) {
    const Parallel serial;
    parallel.run(count, [&](int64_t i) { gemm(groups[static_cast<size_t>(i)], serial); });
    return;
  }
  for (const Gemm& one : groups) gemm(one, parallel);
}

}  // namespace jaxtap::te
