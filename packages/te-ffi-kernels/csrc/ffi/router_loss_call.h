// What a call of the router's loss is given, checked, whatever platform it runs on. There may be
// more axes before those of probs: a loss for each.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "router/options.h"

namespace jaxtap::ffi {

struct RouterLossConfig {
  template <class Attributes>
  explicit RouterLossConfig(const Attributes& attributes)
      : topk(NeedAttribute<int64_t>(attributes, "topk")),
        coeff(NeedAttribute<double>(attributes, "coeff")) {
    if (topk < 1) throw invalid_argument("topk must be positive, got ", topk);
  }

  int64_t topk;
  double coeff;
};

// Of [..., tokens, experts]; each of the axes before has a loss of its own.
struct RouterLossShape {
  RouterLossShape(const Array& probs, const Array& tokens_per_expert, const Array& const_buf) {
    const int64_t rank = probs.rank();
    if (rank < 2) {
      throw invalid_argument(probs.name, " must be [tokens, experts], got ", probs.Text());
    }
    batch = probs.Product(0, rank - 2);
    tokens = probs.shape[rank - 2];
    experts = probs.shape[rank - 1];
    NeedFloat(probs);
    tokens_per_expert.NeedDtype({DType::S32, DType::S64, DType::S16, DType::F32, DType::BF16});
    NeedSize(tokens_per_expert, batch * experts, "one for each expert");
    NeedSize(const_buf.NeedDtype({DType::F32}), 2 * batch, "the coefficient, and the loss");
  }

  int64_t batch, tokens, experts;
};

struct RouterLossCall {
  static constexpr char kTarget[] = "te_ffi_kernels.fused_moe_aux_loss_forward";
  using Config = RouterLossConfig;

  template <class Call>
  explicit RouterLossCall(const Call& call)
      : config(ConfigOf<Config>(call, 2, 2)),
        probs(call.Operand(0, "probs")),
        tokens_per_expert(call.Operand(1, "tokens_per_expert")),
        aux_loss(call.Result(0, "aux_loss")),
        const_buf(call.Result(1, "const_buf")),
        shape(probs, tokens_per_expert, const_buf) {
    NeedSize(aux_loss.NeedDtype({probs.dtype}), shape.batch, "the loss");
  }

  float coefficient() const {
    return router::coefficient(shape.tokens, shape.experts, config.topk, config.coeff);
  }

  Config config;
  Array probs, tokens_per_expert, aux_loss, const_buf;
  RouterLossShape shape;
};

struct RouterLossGradientCall {
  static constexpr char kTarget[] = "te_ffi_kernels.fused_moe_aux_loss_backward";
  using Config = NoConfig;

  template <class Call>
  explicit RouterLossGradientCall(const Call& call)
      : config(ConfigOf<Config>(call, 3, 1)),
        const_buf(call.Operand(0, "const_buf")),
        tokens_per_expert(call.Operand(1, "tokens_per_expert")),
        grad(call.Operand(2, "grad_aux_loss")),
        out(call.Result(0, "grad_probs")),
        shape(out, tokens_per_expert, const_buf) {
    NeedSize(grad.NeedDtype({out.dtype}), shape.batch, "the gradient of the loss");
  }

  Config config;
  Array const_buf, tokens_per_expert, grad, out;
  RouterLossShape shape;
};

}  // namespace jaxtap::ffi
