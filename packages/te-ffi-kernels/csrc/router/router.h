// Routers of mixtures of experts: which experts a token goes to, with what weight, and the loss
// that evens them out.
#pragma once

#include <cstdint>

#include "common/forward.h"
#include "router/options.h"
#include "te/table.h"

namespace jaxtap::router {

struct Forward {
  Options options;
  int64_t tokens = 0;
  te::Float dtype = te::Float::kF32;
  const void* logits = nullptr;  // [tokens, experts]
  const float* bias = nullptr;   // [experts], added to scores for the choice alone; or none
  void* probs = nullptr;         // [tokens, experts], zero where not chosen; dense: the scores
  uint8_t* map = nullptr;        // [tokens, map_bytes]
  // [tokens, experts] for `backward`: sigmoids; softmax, of those chosen where it's after the
  // choice (-infinity elsewhere); the logits for sqrtsoftplus.
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

// The loss: coefficient * sum over experts of (sum over tokens of probs) * tokens_per_expert.
struct Loss {
  int64_t tokens = 0, experts = 0;
  te::Float dtype = te::Float::kF32;
  float coefficient = 0.0f;
};

float loss(const Loss& args, const void* probs, const float* tokens_per_expert,
           const Parallel& parallel);

// Of probs: coefficient * tokens_per_expert * grad, in each row.
void loss_gradient(const Loss& args, const float* tokens_per_expert, float grad, void* out,
                   const Parallel& parallel);

}  // namespace jaxtap::router
