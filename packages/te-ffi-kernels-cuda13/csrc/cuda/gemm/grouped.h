// Matmuls of groups: cuBLASLt's for each group, whose sizes the host must know.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/gemm/plan.h"
#include "te/grouped_gemm.h"

namespace jaxtap::cuda {

// How addresses of all groups are aligned, whatever the sizes are: 16 or a smaller power of two.
uint32_t grouped_alignment(const te::GroupedGemm& args);

// Sizes to warm up with, which are as even as can be.
std::vector<int32_t> even_sizes(const te::GroupedGemm& args);

class GroupedGemmPlan {
 public:
  // Takes from `args` everything but addresses.
  GroupedGemmPlan(CublasLt& lt, LtHandle handle, const te::GroupedGemm& args,
                  const GemmPlan::Options& options);

  // `sizes` are on the host, and checked; alpha and beta of `memory` have one for each group. Plans
  // that cuBLASLt has not are made, which takes microseconds.
  void run(const te::GroupedGemm& args, const int32_t* sizes, const GemmMemory& memory,
           Stream stream);

  size_t plans() const { return plans_.size(); }

  // Of different sizes, that are kept at once.
  static constexpr size_t kMostPlans = 1024;

 private:
  std::shared_ptr<GemmPlan> of(int64_t size, const te::Gemm& group);

  CublasLt& lt_;
  const LtHandle handle_;
  GemmPlan::Options options_;
  std::mutex lock_;
  std::map<int64_t, std::shared_ptr<GemmPlan>> plans_;  // by a group's size
};

}  // namespace jaxtap::cuda
