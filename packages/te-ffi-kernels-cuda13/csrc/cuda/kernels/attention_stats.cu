// Log-sum-exps of nothing: a thread has one.
#include "cuda/device.h"
#include "cuda/kernels/attention.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

void attention_none(const AttentionNone& args, Stream stream) {
  launch(attention_none_kernel, ceil_of(args.count, kThreads), kThreads, stream, args);
}

void attention_stats(const AttentionStats& args, Stream stream) {
  launch(attention_stats_kernel, ceil_of(args.count, kThreads), kThreads, stream, args);
}

}  // namespace jaxtap::cuda
