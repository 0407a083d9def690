// What attention needs around its matmuls: where segments are, and results of queries that see no
// key. Where segments are is read as the CPU's handlers read it.
#include "cuda/device.h"
#include "cuda/kernels/attention.h"

namespace jaxtap::cuda {
namespace {

struct Span {
  int64_t begin, length;
};

JAXTAP_DEVICE int64_t cut(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

JAXTAP_DEVICE Span span_of(const AttentionSide& side, int64_t segment) {
  const int64_t length =
      static_cast<int64_t>(side.cumulative[segment + 1]) - side.cumulative[segment];
  if (side.at == nullptr) return {segment * side.most, cut(length, side.most)};
  const int64_t begin = cut(side.at[segment], side.tokens), left = side.tokens - begin;
  return {begin, cut(length, side.most < left ? side.most : left)};
}

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

// A warp has a token.
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

constexpr int kPlaces = 5;

struct Args {
  AttentionSegments given;
  int64_t each;  // segments of a thread
};

JAXTAP_DEVICE void write_place(const AttentionSegments& args, int64_t i, int64_t q, int64_t kv) {
  const int64_t row = args.segments + 1;
  JAXTAP_UNROLL
  for (int p = 0; p < kPlaces; ++p) {
    const bool is_keys = p == 1 || p == 2;
    args.places[p * row + i] = (is_keys ? kv : q) * args.strides[p];
  }
}

JAXTAP_DEVICE void write_random(const AttentionSegments& args) {
  const uint32_t low = args.words > 0 ? args.random[0] : 0;
  const uint32_t high = args.words > 1 ? args.random[1] : 0;
  if (args.seed != nullptr) {
    args.seed[0] = static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
    args.seed[1] = args.words >= 4 && args.state == nullptr ? args.random[2] : 0;
  }
  for (int64_t i = 0; i < args.state_words; ++i) {
    args.state[i] = i == 0 ? low : i == 1 ? high : 0;
  }
}

// One block. A thread has some segments that are beside each other, and counts those that come
// before by the counts of the threads before it.
__global__ void attention_segments_kernel(Args all) {
  const AttentionSegments& args = all.given;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) write_random(args);
  if (args.q_lengths == nullptr) return;
  const int64_t begin = cut(thread * all.each, args.segments);
  const int64_t end = cut(begin + all.each, args.segments);
  if (args.places == nullptr) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t q = span_of(args.q, i).length, kv = span_of(args.kv, i).length;
      args.q_lengths[i] = static_cast<int32_t>(kv == 0 ? 0 : q);
      args.kv_lengths[i] = static_cast<int32_t>(kv == 0 ? 1 : kv);
    }
    return;
  }
  __shared__ int32_t counts[kThreads];
  int32_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    count += span_of(args.q, i).length > 0 && span_of(args.kv, i).length > 0;
  }
  counts[thread] = count;
  __syncthreads();
  int64_t at = 0, some = 0;
  for (int other = 0; other < kThreads; ++other) {
    if (other < thread) at += counts[other];
    some += counts[other];
  }
  for (int64_t i = begin; i < end; ++i) {
    const Span q = span_of(args.q, i), kv = span_of(args.kv, i);
    if (q.length == 0 || kv.length == 0) continue;
    args.q_lengths[at] = static_cast<int32_t>(q.length);
    args.kv_lengths[at] = static_cast<int32_t>(kv.length);
    write_place(args, at++, q.begin, kv.begin);
  }
  for (int64_t i = some + thread; i <= args.segments; i += kThreads) {
    if (i < args.segments) args.q_lengths[i] = args.kv_lengths[i] = 0;
    write_place(args, i, args.q.tokens, args.kv.tokens);
  }
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Log-sum-exps of nothing: a thread has one.
__global__ void attention_none_kernel(AttentionNone args) {
  const int64_t i = thread_number();
  if (i < args.count) args.out[i] = -kInfinity;
}

__global__ void attention_stats_kernel(AttentionStats args) {
  const int64_t i = thread_number();
  if (i >= args.count) return;
  const float x = args.stats[i];
  args.out[i] = x == -kInfinity ? kInfinity : x;
}

}  // namespace

void attention_clear(const AttentionClear& args, Stream stream) {
  launch(attention_clear_kernel, ceil_of(args.segments * args.own.most, kTokens), kThreads, stream,
         args);
}

void attention_segments(const AttentionSegments& args, Stream stream) {
  const Args all = {args, ceil_of(args.segments, kThreads)};
  launch(attention_segments_kernel, 1, kThreads, stream, all);
}

void attention_none(const AttentionNone& args, Stream stream) {
  launch(attention_none_kernel, ceil_of(args.count, kThreads), kThreads, stream, args);
}

void attention_stats(const AttentionStats& args, Stream stream) {
  launch(attention_stats_kernel, ceil_of(args.count, kThreads), kThreads, stream, args);
}

}  // namespace jaxtap::cuda
