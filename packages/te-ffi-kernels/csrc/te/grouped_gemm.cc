#include "te/grouped_gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace jaxtap::te {

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
