// What a call of the router is given, checked, whatever platform it runs on.

#pragma once

#include "ffi/attributes.h"
#include "ffi/te_arguments.h"
#include "router/check.h"

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
    throw invalid_argument(array.name, " is ", array.Text(), ", and must be [tokens, experts]");
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

struct RouterForwardCall {
  Array logits, bias, probs, map, saved;

  // Whether there is a bias, and it's used.
  bool has_bias(const router::Options& options) const {
    return !options.dense && bias.size() != 0;
  }

  // Returns how many tokens there are; the options know of experts afterwards.
  int64_t Check(router::Options& options) const {
    NeedFloat(logits);
    const int64_t tokens = TakeExperts(logits, options);
    if (has_bias(options)) {
      NeedSize(NeedFloat(bias), options.experts, "one for each expert, or none");
      if (options.score == router::Score::kSoftmax) {
        throw invalid_argument("expert_bias is ", bias.Text(),
                               ", and must be empty: softmax has none");
      }
    }
    probs.NeedDtype({logits.dtype});
    NeedSize(probs, logits.size(), "as logits");
    NeedMap(map, options, tokens);
    NeedSize(saved.NeedDtype({DType::F32}), logits.size(), "as logits");
    return tokens;
  }
};

struct RouterBackwardCall {
  Array map, saved, grad, out;

  // As that of the forward pass.
  int64_t Check(router::Options& options) const {
    NeedFloat(grad);
    const int64_t tokens = TakeExperts(grad, options);
    if (!options.dense) NeedMap(map, options, tokens);
    NeedSize(saved.NeedDtype({DType::F32}), grad.size(), "as grad_probs");
    NeedSize(out.NeedDtype({grad.dtype}), grad.size(), "as grad_probs");
    return tokens;
  }
};

}  // namespace jaxtap::ffi
