// What a call of the router is given, checked, whatever platform it runs on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "router/check.h"
#include "router/router.h"

namespace jaxtap::ffi {

// Without the number of experts, which operands have.
template <class Attributes>
router::Options RouterOptions(const Attributes& attributes, bool forward) {
  router::Options options;
  options.topk = NeedAttribute<int64_t>(attributes, "topk");
  options.score = static_cast<router::Score>(NeedAttribute<int64_t>(attributes, "score_function"));
  options.dense = NeedAttribute<int64_t>(attributes, "compute_aux_scores") != 0;
  options.format =
      static_cast<router::MapFormat>(NeedAttribute<int64_t>(attributes, "routing_map_format"));
  const bool before = NeedAttribute<int64_t>(attributes, "use_pre_softmax") != 0;
  const double scaling = NeedAttribute<double>(attributes, "scaling_factor");
  if (!options.dense) {
    options.pre_softmax = before;
    options.scaling = static_cast<float>(scaling);
  }
  if (forward) {
    const auto groups = NeedAttribute<int64_t>(attributes, "num_groups");
    const auto group_topk = NeedAttribute<int64_t>(attributes, "group_topk");
    if (!options.dense && group_topk > 0) {
      options.groups = groups;
      options.group_topk = group_topk;
    }
  }
  router::check(options);
  return options;
}

// Takes the number of experts of [tokens, experts], and returns that of tokens.
inline int64_t TakeExperts(const Array& array, router::Options& options) {
  if (array.rank() < 1) {
    throw invalid_argument(array.name, " must be [tokens, experts], got ", array.Text());
  }
  options.experts = array.shape[array.rank() - 1];
  router::check_experts(options);
  return array.Product(0, array.rank() - 1);
}

inline void NeedMap(const Array& map, const router::Options& options, int64_t tokens) {
  const bool bits = options.format == router::MapFormat::kBits;
  if (bits) {
    map.NeedDtype({DType::U8});
  } else {
    map.NeedDtype({DType::PRED, DType::U8});
  }
  NeedSize(map, tokens * router::map_bytes(options.format, options.experts),
           bits ? "a bit for each expert" : "one for each expert");
}

template <bool kForward>
struct RouterConfig {
  template <class Attributes>
  explicit RouterConfig(const Attributes& attributes)
      : options(RouterOptions(attributes, kForward)) {}

  router::Options options;
};

struct RouterForwardCall {
  static constexpr char kTarget[] = "te_ffi_kernels.fused_topk_with_score_function_forward";
  using Config = RouterConfig<true>;

  template <class Call>
  explicit RouterForwardCall(const Call& call)
      : options(ConfigOf<Config>(call, 2, 3).options),
        logits(call.Operand(0, "logits")),
        bias(call.Operand(1, "expert_bias")),
        probs(call.Result(0, "probs")),
        map(call.Result(1, "routing_map")),
        saved(call.Result(2, "intermediate_output")),
        tokens(TakeExperts(NeedFloat(logits), options)) {
    if (has_bias()) {
      NeedSize(NeedFloat(bias), options.experts, "one for each expert, or none");
      if (options.score == router::Score::kSoftmax) {
        throw invalid_argument("expert_bias must be empty, got ", bias.Text(), ". Softmax has "
                               "none.");
      }
    }
    probs.NeedDtype({logits.dtype});
    NeedSize(probs, logits.size(), "as logits");
    NeedMap(map, options, tokens);
    NeedSize(saved.NeedDtype({DType::F32}), logits.size(), "as logits");
  }

  // Whether there is a bias, and it's used.
  bool has_bias() const { return !options.dense && bias.size() != 0; }

  // Sets what platforms' routers are told alike: all but the bias.
  template <class Forward>
  void Set(Forward& args) const {
    args.options = options;
    args.tokens = tokens;
    args.dtype = te::float_of(logits.dtype);
    args.logits = logits.data;
    args.probs = probs.data;
    args.map = static_cast<uint8_t*>(map.data);
    args.saved = static_cast<float*>(saved.data);
  }

  router::Options options;
  Array logits, bias, probs, map, saved;
  int64_t tokens;
};

struct RouterBackwardCall {
  static constexpr char kTarget[] = "te_ffi_kernels.fused_topk_with_score_function_backward";
  using Config = RouterConfig<false>;

  template <class Call>
  explicit RouterBackwardCall(const Call& call) {
    args.options = ConfigOf<Config>(call, 3, 1).options;
    const Array map = call.Operand(0, "routing_map"), grad = call.Operand(2, "grad_probs");
    const Array saved = call.Operand(1, "intermediate_output"), out = call.Result(0, "grad_logits");
    args.tokens = TakeExperts(NeedFloat(grad), args.options);
    if (!args.options.dense) NeedMap(map, args.options, args.tokens);
    NeedSize(saved.NeedDtype({DType::F32}), grad.size(), "as grad_probs");
    NeedSize(out.NeedDtype({grad.dtype}), grad.size(), "as grad_probs");
    args.dtype = te::float_of(grad.dtype);
    args.map = static_cast<const uint8_t*>(map.data);
    args.saved = static_cast<const float*>(saved.data);
    args.grad = grad.data;
    args.out = out.data;
  }

  router::Backward args;
};

}  // namespace jaxtap::ffi
