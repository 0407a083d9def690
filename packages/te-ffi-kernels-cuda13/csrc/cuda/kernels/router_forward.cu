// The choice of experts for tokens.
#include "cuda/kernels/router_token.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 128;

// Leaves the experts of the best groups. `sums` has room for a number for each group.
template <class Experts>
JAXTAP_DEVICE void choose_groups(const router::Options& options, Experts& experts, float* sums,
                                 int lane) {
  const int64_t size = options.experts / options.groups;
  const int64_t each = options.topk / options.group_topk;
  __syncwarp();  // what is in place of the sums has been read
  for (int64_t group = 0; group < options.groups; ++group) {
    float sum = 0.0f;
    Ranked last = kStart;
    for (int64_t i = 0; i < each; ++i) {
      last = experts.next(last, group * size, (group + 1) * size);
      sum += score_of(last);
    }
    if (lane == 0) sums[group] = sum;
  }
  __syncwarp();
  const auto rank = [&](int64_t group) { return ranked(sums[group], static_cast<int>(group)); };
  Ranked last = kStart;
  for (int64_t i = 0; i < options.group_topk; ++i) {
    Next next(last);
    for (int64_t group = lane; group < options.groups; group += kWarp) next.show(rank(group));
    last = next.found();
  }
  experts.leave([&](const Ranked& one) { return !is_before(last, rank(one.at / size)); });
  __syncwarp();  // other numbers may be where the sums are
}

template <class Format, int kSlots>
__global__ void __launch_bounds__(kThreads, 4) router_forward_kernel(RouterForward args) {
  using Type = typename Format::Type;
  const int64_t token = thread_number() / kWarp;
  if (token >= args.tokens) return;
  const int lane = threadIdx.x % kWarp;
  const router::Options& options = args.options;
  const int64_t count = options.experts;
  auto* probs = static_cast<Type*>(args.probs) + token * count;
  float* saved = args.saved + token * count;
  const Scores<Format> scores(args, token, lane);
  Experts<Format, kSlots> experts(scores, probs, saved, count, lane);

  if (options.group_topk > 0) choose_groups(options, experts, saved, lane);
  Ranked last = kStart;
  for (int64_t i = 0; i < options.topk; ++i) last = experts.next(last, 0, count);
  experts.leave([&](const Ranked& one) { return !is_before(last, one); });

  // What scores of those chosen become: e^(x - top) * factor, or x / divisor.
  const bool softmax_after = options.score == Score::kSoftmax && !scores.of_all;
  float top = kBelowAll, factor = 1.0f, divisor = 1.0f, sum = 0.0f;
  if (softmax_after) {
    experts.each([&](int64_t at) { top = larger(scores(at), top); });
    top = largest_of(top);
    experts.each([&](int64_t at) { sum += vexp(scores(at) - top); });
    factor = 1.0f / sum_of(sum);
  } else if (options.score != Score::kSoftmax && !options.dense && options.topk > 1) {
    experts.each([&](int64_t at) { sum += scores(at); });
    divisor = sum_of(sum) + kRouterEpsilon;
  }

  const bool bits = options.format == router::MapFormat::kBits;
  const int64_t bytes = router::map_bytes(options.format, count);
  uint8_t* map = args.map + token * bytes;
  for (int64_t base = 0; base < count; base += kWarp) {
    const int64_t at = base + lane;
    const bool chosen = at < count && experts.marked(at);
    if (bits) {
      const unsigned word = __ballot_sync(~0u, chosen);
      const int64_t byte = base / 8 + lane;
      if (lane < kWarp / 8 && byte < bytes) map[byte] = static_cast<uint8_t>(word >> (8 * lane));
    }
    if (at >= count) continue;
    if (!bits) map[at] = chosen;
    const float score = scores(at);
    const float weight = softmax_after ? vexp(score - top) * factor : score / divisor;
    if (softmax_after) {
      saved[at] = chosen ? weight : kBelowAll;
    } else {
      saved[at] = options.score == Score::kSqrtSoftplus ? scores.logit(at) : scores.whole(at);
    }
    probs[at] = Format::store(options.dense ? score : chosen ? options.scaling * weight : 0.0f);
  }
}

template <class Format>
void run(const RouterForward& args, Stream stream) {
  const int64_t blocks = ceil_of(args.tokens, kThreads / kWarp), count = args.options.experts;
  const auto with = [&](auto kernel) { launch(kernel, blocks, kThreads, stream, args); };
  if (count <= 2 * kWarp) {
    with(router_forward_kernel<Format, 2>);
  } else if (count <= 4 * kWarp) {
    with(router_forward_kernel<Format, 4>);
  } else if (count <= 8 * kWarp) {
    with(router_forward_kernel<Format, 8>);
  } else if (count <= 16 * kWarp) {
    with(router_forward_kernel<Format, 16>);
  } else {
    with(router_forward_kernel<Format, 0>);
  }
}

}  // namespace

void router_forward(const RouterForward& args, Stream stream) {
  by_float(args.dtype, [&](auto of) { run<decltype(of)>(args, stream); });
}

}  // namespace jaxtap::cuda
