// Options of routers that can't be.
#pragma once

#include <cstdint>
#include <limits>

#include "common/error.h"
#include "router/options.h"

namespace jaxtap::router {

// Throws invalid_argument for options that no call can have.
inline void check(const Options& options) {
  const auto score = static_cast<int64_t>(options.score);
  if (score < 0 || score > 2) {
    throw invalid_argument("score_function must be 0 (sigmoid), 1 (softmax) or 2 (sqrtsoftplus), "
                           "got ", score);
  }
  const auto format = static_cast<int64_t>(options.format);
  if (format < 0 || format > 1) {
    throw invalid_argument("routing_map_format must be 0 (bytemap) or 1 (bitmap), got ", format);
  }
  if (options.topk < 1) throw invalid_argument("topk must be positive, got ", options.topk);
  if (options.group_topk <= 0) return;
  if (options.topk % options.group_topk != 0) {
    throw invalid_argument("group_topk must divide topk, ", options.topk, ", got ",
                           options.group_topk);
  }
  if (options.groups < options.group_topk) {
    throw invalid_argument("num_groups must be at least group_topk, ", options.group_topk, ", got ",
                           options.groups);
  }
}

// Throws for options that no call with so many experts can have.
inline void check_experts(const Options& options) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // their indices are int32
  const int64_t experts = options.experts;
  if (options.topk > experts || experts > kMost) {
    throw invalid_argument("topk must not be above the number of experts, ", experts, " (itself "
                           "below 2^31), got ", options.topk);
  }
  if (options.group_topk <= 0) return;
  if (experts % options.groups != 0) {
    throw invalid_argument("num_groups must divide the number of experts, ", experts, ", got ",
                           options.groups);
  }
  if (options.topk / options.group_topk > experts / options.groups) {
    throw invalid_argument("topk / group_topk must not be above the ", experts / options.groups, " "
                           "experts of a group, got ", options.topk / options.group_topk);
  }
}

}  // namespace jaxtap::router
