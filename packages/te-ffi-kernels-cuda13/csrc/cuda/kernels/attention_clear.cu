// A warp has a token.
#include "cuda/kernels/attention_side.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = kThreads / kWarp;

// Whether a place, of `length`, sees none of `others`.
JAXTAP_DEVICE bool sees_nothing(const AttentionClear& args, int64_t place, int64_t length,
                                int64_t others) {
  const int64_t middle = place + (args.bottom_right ? others - length : 0);
  const int64_t first = args.left < 0 || middle < args.left ? 0 : middle - args.left;
  const int64_t last = args.right < 0 || middle + args.right >= others ? others - 1
                                                                       : middle + args.right;
  return first > last;
}

__global__ void attention_clear_kernel(AttentionClear args) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokens +
                        static_cast<int64_t>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (token >= args.segments * args.own.most) return;
  const int64_t segment = token / args.own.most, place = token % args.own.most;
  const Span own = span_of(args.own, segment), other = span_of(args.other, segment);
  const bool inside = place < own.length;
  if (inside ? !sees_nothing(args, place, own.length, other.length) : args.own.at != nullptr) {
    return;
  }
  uint32_t* data = args.data + (own.begin + place) * args.stride;
  for (int64_t i = lane; i < args.width; i += kWarp) data[i] = 0;
  if (args.stats == nullptr) return;
  // Of packed segments tokens are counted over all.
  float* stats = args.own.at == nullptr
                     ? args.stats + segment * args.stats_segment + place * args.stats_token
                     : args.stats + (own.begin + place) * args.stats_token;
  for (int64_t head = lane; head < args.heads; head += kWarp) {
    stats[head * args.stats_head] = inside && args.sink != nullptr
                                        ? args.sink[head]
                                        : -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

void attention_clear(const AttentionClear& args, Stream stream) {
  launch(attention_clear_kernel, ceil_of(args.segments * args.own.most, kTokens), kThreads, stream,
         args);
}

}  // namespace jaxtap::cuda
