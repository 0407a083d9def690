// The loss of a router, and its gradient. A block has some of the numbers of one loss, in the order
// in which they are in memory.
#include "cuda/kernels/router.h"
#include "cuda/kernels/router_scores.h"

namespace jaxtap::cuda {
namespace {

constexpr int kThreads = 256;

struct Args : RouterLoss {
  const void* given;  // probs, or the gradient of the losses
  double* parts;
  void* out;
  float coefficient;
  int64_t part, parts_each;  // numbers of a block, and blocks of a loss
};

JAXTAP_DEVICE float count_of(const Args& args, int64_t at) {
  switch (args.counts_dtype) {
    case DType::S64: return static_cast<float>(static_cast<const int64_t*>(args.counts)[at]);
    case DType::S32: return static_cast<float>(static_cast<const int32_t*>(args.counts)[at]);
    case DType::S16: return static_cast<float>(static_cast<const int16_t*>(args.counts)[at]);
    case DType::BF16: return number_at(args.counts, te::Float::kBF16, at);
    default: return number_at(args.counts, te::Float::kF32, at);
  }
}

// Calls body(number, expert) for those of this thread's numbers, of the loss that the block has.
template <class Body>
JAXTAP_DEVICE void each_number(const Args& args, Body&& body) {
  const int64_t size = args.tokens * args.experts;
  const int64_t begin = blockIdx.x % args.parts_each * args.part;
  const int64_t end = begin + args.part < size ? begin + args.part : size;
  if (begin >= end) return;
  const int64_t step = kThreads % args.experts;
  int64_t expert = (begin + threadIdx.x) % args.experts;
  for (int64_t at = begin + threadIdx.x; at < end; at += kThreads) {
    body(at, expert);
    expert += step;
    if (expert >= args.experts) expert -= args.experts;
  }
}

// The sum over a block, in its first thread.
JAXTAP_DEVICE double sum_to_first(double x, double (&scratch)[kThreads]) {
  const int mine = threadIdx.x;
  scratch[mine] = x;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (mine < half) scratch[mine] += scratch[mine + half];
  }
  return scratch[0];
}

template <class Format>
JAXTAP_DEVICE double sum_of_part(const Args& args) {
  const int64_t loss = blockIdx.x / args.parts_each;
  const auto* probs =
      static_cast<const typename Format::Type*>(args.given) + loss * args.tokens * args.experts;
  double sum = 0;
  each_number(args, [&](int64_t at, int64_t expert) {
    const float count = count_of(args, loss * args.experts + expert);
    sum += static_cast<double>(Format::load(probs[at])) * static_cast<double>(count);
  });
  return sum;
}

template <class Format>
__global__ void router_loss_parts_kernel(Args args) {
  __shared__ double scratch[kThreads];
  const double sum = sum_to_first(sum_of_part<Format>(args), scratch);
  if (threadIdx.x == 0) args.parts[blockIdx.x] = sum;
}

// Each block has a loss, and adds up its parts, or its numbers where there are no parts.
template <class Format>
__global__ void router_loss_kernel(Args args) {
  __shared__ double scratch[kThreads];
  const int64_t loss = blockIdx.x;
  double sum = 0;
  if (args.parts != nullptr) {
    for (int64_t i = threadIdx.x; i < args.parts_each; i += kThreads) {
      sum += args.parts[loss * args.parts_each + i];
    }
  } else {
    sum = sum_of_part<Format>(args);
  }
  sum = sum_to_first(sum, scratch);
  if (threadIdx.x != 0) return;
  const auto result = static_cast<float>(sum * static_cast<double>(args.coefficient));
  static_cast<typename Format::Type*>(args.out)[loss] = Format::store(result);
  args.numbers[2 * loss] = args.coefficient;
  args.numbers[2 * loss + 1] = result;
}

template <class Format>
__global__ void router_loss_gradient_kernel(Args args) {
  using Type = typename Format::Type;
  const int64_t loss = blockIdx.x / args.parts_each;
  const float coefficient = args.numbers[2 * loss];
  const float grad = Format::load(static_cast<const Type*>(args.given)[loss]);
  Type* out = static_cast<Type*>(args.out) + loss * args.tokens * args.experts;
  each_number(args, [&](int64_t at, int64_t expert) {
    const float count = count_of(args, loss * args.experts + expert);
    out[at] = Format::store(coefficient * count * grad);
  });
}

Args args_of(const RouterLoss& given, const void* from, void* to) {
  Args args = {};
  static_cast<RouterLoss&>(args) = given;
  args.given = from;
  args.out = to;
  args.part = kLossPart;
  args.parts_each = loss_parts(given);
  return args;
}

template <class Format>
void run(const Args& args, Stream stream) {
  if (args.parts != nullptr) {
    launch(router_loss_parts_kernel<Format>, args.batch * args.parts_each, kThreads, stream, args);
  }
  launch(router_loss_kernel<Format>, args.batch, kThreads, stream, args);
}

template <class Format>
void run_gradient(const Args& args, Stream stream) {
  launch(router_loss_gradient_kernel<Format>, args.batch * args.parts_each, kThreads, stream, args);
}

}  // namespace

void router_loss(const RouterLoss& given, float coefficient, const void* probs, double* parts,
                 void* out, Stream stream) {
  Args args = args_of(given, probs, out);
  args.parts = parts;
  args.coefficient = coefficient;
  if (parts == nullptr) {
    args.part = given.tokens * given.experts;
    args.parts_each = 1;
  }
  by_float(given.dtype, [&](auto of) { run<decltype(of)>(args, stream); });
}

void router_loss_gradient(const RouterLoss& given, const void* grad, void* out, Stream stream) {
  const Args args = args_of(given, grad, out);
  by_float(given.dtype, [&](auto of) { run_gradient<decltype(of)>(args, stream); });
}

}  // namespace jaxtap::cuda
