// Routers of mixtures of experts: which experts a token goes to, with what weight, and the loss
// that evens them out.
#pragma once

#include <cstdint>

#include "common/convert.h"
#include "common/parallel.h"
#include "te/modes.h"

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

// Throws invalid_argument for options that no call can have, or none with so many experts.
void check(const Options& options);
void check_experts(const Options& options);

struct Forward {
  Options options;
  int64_t tokens = 0;
  te::Float dtype = te::Float::kF32;
  const void* logits = nullptr;  // [tokens, experts]
  const float* bias = nullptr;   // [experts], added to scores for the choice alone; or none
  void* probs = nullptr;         // [tokens, experts], zero where not chosen; dense: the scores
  uint8_t* map = nullptr;        // [tokens, map_bytes]
  // [tokens, experts] for `backward`: sigmoids; softmax, of those chosen where it's after the choice
  // (-infinity elsewhere); the logits for sqrtsoftplus.
  float* saved = nullptr;
};

// In float32, rounded at the end. Of equal scores the lower index is chosen; the order is that of
// the bits, so that NaN is above all, and -0 below 0.
void forward(const Forward& args, const Parallel& parallel);

struct Backward {
  Options options;
  int64_t tokens = 0;
  te::Float dtype = te::Float::kF32;
  const uint8_t* map = nullptr;  // not read if `dense`
  const float* saved = nullptr;
  const void* grad = nullptr;  // of probs
  void* out = nullptr;         // of logits
};

void backward(const Backward& args, const Parallel& parallel);

// The loss: coefficient * sum over experts of (sum over tokens of probs) * tokens_per_expert, where
// coefficient = experts * coeff / topk / tokens^2 (and 0 without tokens).
struct Loss {
  int64_t tokens = 0, experts = 0;
  te::Float dtype = te::Float::kF32;
  float coefficient = 0.0f;
};

float coefficient(int64_t tokens, int64_t experts, int64_t topk, double coeff);

float loss(const Loss& args, const void* probs, const float* tokens_per_expert,
           const Parallel& parallel);

// Of probs: coefficient * tokens_per_expert * grad, in each row.
void loss_gradient(const Loss& args, const float* tokens_per_expert, float grad, void* out,
                   const Parallel& parallel);

}  // namespace jaxtap::router
