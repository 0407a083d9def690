#include "cuda/gemm/grouped.h"

#include <algorithm>

namespace jaxtap::cuda {

uint32_t grouped_alignment(const te::GroupedGemm& args) {
  const te::Gemm& each = args.each;
  const bool rows = args.ragged == te::Ragged::kRows;
  const auto size = static_cast<int64_t>(byte_size(each.lhs.dtype));
  uint32_t found = 16;
  const auto fit = [&](int64_t bytes) {
    while (bytes % found != 0) found /= 2;
  };
  // Quantized values are copied to where they're aligned, unless they are, and so are their sums
  // unless their columns are multiples of 16. cuBLASLt has no matmul of float8 for less.
  if (each.scaling != te::Scaling::kNone) return found;
  fit(size * (rows ? each.k : each.m));
  fit(size * (rows ? each.k * each.n : each.n));
  fit(te::bytes_of(each.out_dtype) * (rows ? each.n : each.m * each.n));
  return found;
}

std::vector<int32_t> even_sizes(const te::GroupedGemm& args) {
  const bool blocks = args.each.scaling == te::Scaling::kMx && args.ragged == te::Ragged::kDepth;
  const int64_t unit = blocks ? te::kBlock : 1;
  const int64_t each = args.length / std::max<int64_t>(args.groups, 1) / unit * unit;
  return std::vector<int32_t>(static_cast<size_t>(args.groups), static_cast<int32_t>(each));
}

GroupedGemmPlan::GroupedGemmPlan(CublasLt& lt, LtHandle handle, const te::GroupedGemm& args,
                                 const GemmPlan::Options& options)
    : lt_(lt), handle_(handle), options_(options) {
  options_.alignment = grouped_alignment(args);
}

std::shared_ptr<GemmPlan> GroupedGemmPlan::of(int64_t size, const te::Gemm& group) {
  std::lock_guard<std::mutex> hold(lock_);
  if (plans_.size() >= kMostPlans) plans_.clear();
  std::shared_ptr<GemmPlan>& plan = plans_[size];
  if (plan == nullptr) {
    try {
      plan = std::make_shared<GemmPlan>(lt_, handle_, group, options_);
    } catch (...) {
      plans_.erase(size);
      throw;
    }
  }
  return plan;
}

void GroupedGemmPlan::run(const te::GroupedGemm& args, const int32_t* sizes,
                          const GemmMemory& memory, Stream stream) {
  const int64_t out = args.each.m * args.each.n * te::bytes_of(args.each.out_dtype);
  int64_t start = 0;
  for (int64_t i = 0; i < args.groups; ++i) {
    const te::Gemm group = args.group(i, start, sizes[i]);
    start += sizes[i];
    if (group.m == 0 || group.n == 0) continue;
    if (group.k == 0) {
      set_zero(group.out, out, stream);
      continue;
    }
    GemmMemory mine = memory;
    mine.alpha += i;
    mine.beta += i;
    of(sizes[i], group)->run(group, mine, stream);
  }
  const te::GroupedGemm::Rest rest = args.rest(start);
  set_zero(rest.at, static_cast<int64_t>(rest.bytes), stream);
}

}  // namespace jaxtap::cuda
