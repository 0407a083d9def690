// Routers of mixtures of experts and their loss, as router/router.h has them for the CPU.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cuda/runtime.h"
#include "router/router.h"
#include "te/modes.h"

namespace jaxtap::cuda {

// Arrays of the device, as router::Forward has them.
struct RouterForward {
  router::Options options;
  int64_t tokens = 0;
  te::Float dtype = te::Float::kF32;
  const void* logits = nullptr;
  const void* bias = nullptr;  // or none
  te::Float bias_dtype = te::Float::kF32;
  void* probs = nullptr;
  uint8_t* map = nullptr;
  float* saved = nullptr;
};

// Of equal scores the lower index is chosen; the order is that of the bits.
void router_forward(const RouterForward& args, Stream stream);

using RouterBackward = router::Backward;  // with arrays of the device

void router_backward(const RouterBackward& args, Stream stream);

// `batch` losses, each of [tokens, experts].
struct RouterLoss {
  int64_t batch = 1, tokens = 0, experts = 0;
  te::Float dtype = te::Float::kF32;
  const void* counts = nullptr;  // [batch, experts], what tokens each expert has
  DType counts_dtype = DType::F32;
  float* numbers = nullptr;  // [batch, 2]: the coefficient, and the loss in float32
};

// Probs' numbers that a block adds up.
constexpr int64_t kLossPart = 1 << 14;

inline int64_t loss_parts(const RouterLoss& args) {
  return (args.tokens * args.experts + kLossPart - 1) / kLossPart;
}

// Writes to `numbers`, and to `out` in probs' dtype. `parts` has room for loss_parts for each of
// the losses; without it one block adds all of a loss up. Sums are in float64, and have one order.
void router_loss(const RouterLoss& args, float coefficient, const void* probs, double* parts,
                 void* out, Stream stream);

// Of probs, whose dtype `grad` has, too: the coefficient in `numbers` * counts * grad.
void router_loss_gradient(const RouterLoss& args, const void* grad, void* out, Stream stream);

}  // namespace jaxtap::cuda
