// Means and inverse roots of rows, and their normalized numbers.
#include "cuda/kernels/norm_weights.h"
#include "cuda/kernels/rows.h"

namespace jaxtap::cuda {
namespace {

struct Args {
  const void* x;
  NormWeights gamma, beta;
  float *mean, *rest, *rsigma;
  void* out;
  int* absmax;
  int64_t rows, cols;
  float epsilon;
  bool wide;
};

struct Moments {
  float mean, rest, rsigma;
};

JAXTAP_DEVICE float inverse_root(float mean_square, float epsilon) {
  return 1.0f / sqrtf(mean_square + epsilon);
}

// As on CPU: the variance is of what differs from a first mean, which is off by a rounding.
template <int kTeam, class Row>
JAXTAP_DEVICE Moments layer_moments(const Row& row, int64_t cols, float epsilon, float* scratch) {
  const float count = static_cast<float>(cols);
  float sum = 0.0f;
  row.each([&](int64_t, const auto& numbers) {
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) sum += numbers[0][i];
  });
  const float mean = sum_of_team<kTeam>(sum, scratch) / count;
  float rests = 0.0f, squares = 0.0f;
  row.each([&](int64_t at, const auto& numbers) {
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (at + i >= cols) continue;
      const float some = numbers[0][i] - mean;
      rests += some;
      squares += some * some;
    }
  });
  const float rest = sum_of_team<kTeam>(rests, scratch) / count;
  const float variance = sum_of_team<kTeam>(squares, scratch) / count - rest * rest;
  // What is a result, and what rounding took from it: numbers that are computed again are of both.
  const float whole = mean + rest;
  return {whole, rest - (whole - mean),
          inverse_root(variance < 0.0f ? 0.0f : variance, epsilon)};
}

template <int kTeam, class Row>
JAXTAP_DEVICE Moments rms_moments(const Row& row, int64_t cols, float epsilon, float* scratch) {
  float squares = 0.0f;
  row.each([&](int64_t, const auto& numbers) {
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) squares += numbers[0][i] * numbers[0][i];
  });
  const float mean = sum_of_team<kTeam>(squares, scratch) / static_cast<float>(cols);
  return {0.0f, 0.0f, inverse_root(mean, epsilon)};
}

template <class Format, int kTeam, int kValues>
__global__ void norm_rows_kernel(Args args) {
  using Type = typename Format::Type;
  __shared__ float scratch[kTeam / kWarp];
  const int64_t row = thread_number() / kTeam;
  if (row >= args.rows) return;  // the whole team
  const bool layer = args.mean != nullptr;
  const Type* const from[1] = {static_cast<const Type*>(args.x) + row * args.cols};
  const Rows<Format, kTeam, kValues, 1> numbers(from, args.cols, args.wide);
  const Moments found = layer ? layer_moments<kTeam>(numbers, args.cols, args.epsilon, scratch)
                              : rms_moments<kTeam>(numbers, args.cols, args.epsilon, scratch);
  if (threadIdx.x % kTeam == 0) {
    args.rsigma[row] = found.rsigma;
    if (layer) args.mean[row] = found.mean;
    if (args.rest != nullptr) args.rest[row] = found.rest;
  }
  if (args.out == nullptr) return;
  Type* to = static_cast<Type*>(args.out) + row * args.cols;
  int most = 0;
  numbers.each([&](int64_t at, const auto& x) {
    float gamma[kRun], beta[kRun] = {}, out[kRun];
    const int64_t left = args.cols - at;
    args.gamma.read_at(at, left, args.wide, gamma);
    if (layer) args.beta.read_at(at, left, args.wide, beta);
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) {
      out[i] = normalized(x[0][i], found.mean, found.rest, found.rsigma, gamma[i], beta[i], layer);
      if (at + i < args.cols) most = larger(most, magnitude(out[i]));
    }
    store<Format>(to + at, left, args.wide, out);
  });
  if (args.absmax == nullptr) return;
  most = largest_of(most);
  if (threadIdx.x % kWarp == 0) atomicMax(args.absmax, most);
}

}  // namespace

void norm_rows(const Norm& norm, const Quantize& outputs, Stream stream) {
  Args args = {};
  args.x = norm.x;
  args.gamma = gamma_of(norm);
  args.beta = {norm.kind == norms::Kind::kRms ? nullptr : norm.beta, norm.weights, 0.0f};
  args.mean = norm.mean;
  args.rest = norm.rest;
  args.rsigma = norm.rsigma;
  args.out = outputs.out;
  if (outputs.wants_absmax) args.absmax = reinterpret_cast<int*>(outputs.updated_amax);
  args.rows = norm.rows;
  args.cols = norm.cols;
  args.epsilon = norm.epsilon;
  args.wide = norm.cols % kRun == 0 && args.gamma.wide(kRun) && args.beta.wide(kRun) &&
              aligned(16, static_cast<const char*>(norm.x), static_cast<char*>(outputs.out));
  by_float(norm.dtype, [&](auto of) {
    launch_rows(args, kNormOfWarp, kNormOfBlock, stream, [](auto team, auto values) {
      return norm_rows_kernel<decltype(of), decltype(team)::value, decltype(values)::value>;
    });
  });
}

}  // namespace jaxtap::cuda
