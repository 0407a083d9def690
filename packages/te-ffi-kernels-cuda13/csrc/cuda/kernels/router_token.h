// A token's experts: each warp has a token, and its threads every 32nd expert.
#pragma once

#include "cuda/kernels/router.h"
#include "cuda/kernels/router_order.h"
#include "cuda/kernels/router_scores.h"

namespace jaxtap::cuda {
namespace {

// Scores of logits, and what experts are ranked by.
template <class Format>
struct Scores {
  const typename Format::Type* logits;
  const void* bias;
  te::Float bias_dtype;
  Score kind;
  bool of_all;        // a softmax over all experts
  bool divided;       // others, by their sum over all experts
  float top, factor;  // of a softmax: the largest logit, and 1 / sum
  float divisor;

  __device__ __forceinline__ Scores(const RouterForward& args, int64_t token, int lane)
      : logits(static_cast<const typename Format::Type*>(args.logits) +
               token * args.options.experts),
        bias(args.bias),
        bias_dtype(args.bias_dtype),
        kind(args.options.score),
        of_all(kind == Score::kSoftmax && (args.options.pre_softmax || args.options.dense)),
        divided(kind != Score::kSoftmax && args.options.dense),
        top(kBelowAll),
        factor(1.0f),
        divisor(1.0f) {
    if (!of_all && !divided) return;
    const int64_t experts = args.options.experts;
    if (of_all) {
      for (int64_t at = lane; at < experts; at += kWarp) top = larger(logit(at), top);
      top = largest_of(top);
    }
    float sum = 0.0f;
    for (int64_t at = lane; at < experts; at += kWarp) sum += whole(at);
    sum = sum_of(sum);
    if (of_all) {
      factor = 1.0f / sum;
    } else {
      divisor = sum + kRouterEpsilon;
    }
  }

  __device__ __forceinline__ float logit(int64_t at) const { return Format::load(logits[at]); }

  // Before it's divided.
  __device__ __forceinline__ float whole(int64_t at) const {
    const float x = logit(at);
    if (kind == Score::kSigmoid) return router_sigmoid(x);
    if (kind == Score::kSqrtSoftplus) return sqrt_softplus(x);
    return of_all ? vexp(x - top) * factor : x;
  }

  __device__ __forceinline__ float operator()(int64_t at) const {
    return divided ? whole(at) / divisor : whole(at);
  }

  __device__ __forceinline__ float rank(int64_t at) const {
    const float score = (*this)(at);
    return bias == nullptr ? score : score + number_at(bias, bias_dtype, at);
  }
};

// The experts that may still be chosen. With kSlots, ranks and marks of so many experts per thread
// are in registers; with 0, ranks are computed each time, and marks are where probs will be.
template <class Format, int kSlots>
class Experts {
 public:
  using Type = typename Format::Type;

  // `saved` has numbers of this thread on their way to registers, so that there is one loop that
  // computes them.
  __device__ __forceinline__ Experts(const Scores<Format>& scores, Type* probs, float* saved,
                                     int64_t count, int lane)
      : scores_(scores), marks_(probs), count_(count), lane_(lane) {
    if constexpr (kSlots != 0) {
      for (int64_t at = lane; at < count; at += kWarp) saved[at] = scores.rank(at);
      JAXTAP_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        const int at = slot * kWarp + lane;
        held_[slot] = at < count ? saved[at] : 0.0f;
        bits_ |= static_cast<uint32_t>(at < count) << slot;
      }
    } else {
      for (int64_t at = lane; at < count; at += kWarp) marks_[at] = Type(1);
    }
  }

  // Calls body(expert) for those marked.
  template <class Body>
  __device__ __forceinline__ void each(Body&& body) const {
    for (int64_t at = lane_; at < count_; at += kWarp) {
      if (marked(at)) body(at);
    }
  }

  __device__ __forceinline__ bool marked(int64_t at) const {
    if constexpr (kSlots != 0) {
      return (bits_ >> (at / kWarp) & 1) != 0;
    } else {
      return marks_[at] != Type(0);
    }
  }

  // Of those marked from `begin` to before `end`, the one after `last`.
  __device__ __forceinline__ Ranked next(const Ranked& last, int64_t begin, int64_t end) const {
    Next next(last);
    each_ranked([&](const Ranked& one) {
      if (one.at >= begin && one.at < end) next.show(one);
    });
    return next.found();
  }

  // Leaves those marked of which keeps(ranked).
  template <class Keeps>
  __device__ __forceinline__ void leave(Keeps&& keeps) {
    each_ranked([&](const Ranked& one) {
      if (keeps(one)) return;
      if constexpr (kSlots != 0) {
        bits_ &= ~(1u << (one.at / kWarp));
      } else {
        marks_[one.at] = Type(0);
      }
    });
  }

 private:
  template <class Body>
  __device__ __forceinline__ void each_ranked(Body&& body) const {
    if constexpr (kSlots != 0) {
      JAXTAP_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        if (bits_ >> slot & 1) body(ranked(held_[slot], slot * kWarp + lane_));
      }
    } else {
      each([&](int64_t at) { body(ranked(scores_.rank(at), static_cast<int>(at))); });
    }
  }

  const Scores<Format>& scores_;
  Type* marks_;
  int64_t count_;
  int lane_;
  uint32_t bits_ = 0;
  float held_[kSlots == 0 ? 1 : kSlots];
};

}  // namespace
}  // namespace jaxtap::cuda
