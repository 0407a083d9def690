// What routers are called with, on any platform.
#pragma once

#include <cstdint>
#include <limits>

#include "common/convert.h"
#include "common/error.h"

namespace jaxtap::router {

// With Transformer Engine's numbers.
enum class Score : int64_t { kSigmoid = 0, kSoftmax = 1, kSqrtSoftplus = 2 };

// A byte for each expert, or a bit: bit e % 8 of byte e / 8.
enum class MapFormat : int64_t { kBytes = 0, kBits = 1 };

JAXTAP_INLINE constexpr int64_t map_bytes(MapFormat format, int64_t experts) {
  return format == MapFormat::kBits ? (experts + 7) / 8 : experts;
}

// What is the same for all tokens.
struct Options {
  int64_t experts = 0;
  int64_t topk = 1;
  Score score = Score::kSoftmax;
  // Softmax before the choice; after it, of those chosen, otherwise.
  bool pre_softmax = false;
  // Scores of all experts are wanted, for the loss: no bias, groups or scaling, and sigmoid and
  // sqrtsoftplus sum to one over all experts.
  bool dense = false;
  // Experts are in `groups`, of which `group_topk` are chosen, by the sum of the best topk /
  // group_topk scores in each; 0: no groups.
  int64_t groups = 0, group_topk = 0;
  float scaling = 1.0f;
  MapFormat format = MapFormat::kBytes;
};

// Throws invalid_argument for options that no call can have.
inline void check(const Options& options) {
  const auto score = static_cast<int64_t>(options.score);
  if (score < 0 || score > 2) {
    throw invalid_argument("score_function is ", score,
                           ", and must be 0 (sigmoid), 1 (softmax) or 2 (sqrtsoftplus)");
  }
  const auto format = static_cast<int64_t>(options.format);
  if (format < 0 || format > 1) {
    throw invalid_argument("routing_map_format is ", format,
                           ", and must be 0 (bytemap) or 1 (bitmap)");
  }
  if (options.topk < 1) throw invalid_argument("topk is ", options.topk, ", and must be positive");
  if (options.group_topk <= 0) return;
  if (options.topk % options.group_topk != 0) {
    throw invalid_argument("group_topk is ", options.group_topk, ", and must divide topk, ",
                           options.topk);
  }
  if (options.groups < options.group_topk) {
    throw invalid_argument("num_groups is ", options.groups,
                           ", and must be at least group_topk, ", options.group_topk);
  }
}

// Throws for options that no call with so many experts can have.
inline void check_experts(const Options& options) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // their indices are int32
  const int64_t experts = options.experts;
  if (options.topk > experts || experts > kMost) {
    throw invalid_argument("topk is ", options.topk, ", and must not be above the number of experts, ",
                           experts, " (itself below 2^31)");
  }
  if (options.group_topk <= 0) return;
  if (experts % options.groups != 0) {
    throw invalid_argument("num_groups is ", options.groups,
                           ", and must divide the number of experts, ", experts);
  }
  if (options.topk / options.group_topk > experts / options.groups) {
    throw invalid_argument("topk / group_topk is ", options.topk / options.group_topk,
                           ", and must not be above the ", experts / options.groups,
                           " experts of a group");
  }
}

// What the loss is multiplied with: experts * coeff / topk / tokens^2, and 0 without tokens.
inline float coefficient(int64_t tokens, int64_t experts, int64_t topk, double coeff) {
  if (tokens == 0) return 0.0f;
  const double count = static_cast<double>(tokens);
  return static_cast<float>(static_cast<double>(experts) * coeff / static_cast<double>(topk) /
                            count / count);
}

}  // namespace jaxtap::router
