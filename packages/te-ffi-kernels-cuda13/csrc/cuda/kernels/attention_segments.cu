// One block. A thread has some segments that are beside each other, and counts those that come
// before by the counts of the threads before it.
#include "cuda/kernels/attention_side.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;
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

}  // namespace

void attention_segments(const AttentionSegments& args, Stream stream) {
  const Args all = {args, ceil_of(args.segments, kThreads)};
  launch(attention_segments_kernel, 1, kThreads, stream, all);
}

}  // namespace jaxtap::cuda
