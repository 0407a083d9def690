// What routers are called with, on any platform.
#pragma once

#include <cstdint>

#include "common/convert.h"

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

// What the loss is multiplied with: experts * coeff / topk / tokens^2, and 0 without tokens.
inline float coefficient(int64_t tokens, int64_t experts, int64_t topk, double coeff) {
  if (tokens == 0) return 0.0f;
  const double count = static_cast<double>(tokens);
  return static_cast<float>(static_cast<double>(experts) * coeff / static_cast<double>(topk) /
                            count / count);
}

}  // namespace jaxtap::router
