// The gradient of a norm's numbers.
#include "cuda/kernels/norm_weights.h"
#include "cuda/kernels/rows.h"

namespace jaxtap::cuda {
namespace {

struct Args {
  const void *dz, *x;
  const float *mean, *rsigma;  // no mean: nullptr
  NormWeights gamma;
  void* dx;
  int64_t rows, cols;
  bool wide;
};

template <class Format, int kTeam, int kValues>
__global__ void norm_gradient_rows_kernel(Args args) {
  using Type = typename Format::Type;
  __shared__ float scratch[kTeam / kWarp];
  const int64_t row = thread_number() / kTeam;
  if (row >= args.rows) return;  // the whole team
  const bool layer = args.mean != nullptr;
  const float mean = layer ? args.mean[row] : 0.0f, rsigma = args.rsigma[row];
  const Type* const from[2] = {static_cast<const Type*>(args.dz) + row * args.cols,
                               static_cast<const Type*>(args.x) + row * args.cols};
  const Rows<Format, kTeam, kValues, 2> numbers(from, args.cols, args.wide);
  // Means of dz * gamma, and of that times the normalized numbers.
  float first = 0.0f, second = 0.0f;
  numbers.each([&](int64_t at, const auto& of) {
    float gamma[kRun];
    args.gamma.read_at(at, args.cols - at, args.wide, gamma);
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (at + i >= args.cols) continue;
      const float slope = of[0][i] * gamma[i];
      first += slope;
      second += slope * ((of[1][i] - mean) * rsigma);
    }
  });
  const float count = static_cast<float>(args.cols);
  first = layer ? sum_of_team<kTeam>(first, scratch) / count : 0.0f;  // all threads alike
  second = sum_of_team<kTeam>(second, scratch) / count;
  Type* to = static_cast<Type*>(args.dx) + row * args.cols;
  numbers.each([&](int64_t at, const auto& of) {
    float gamma[kRun], out[kRun];
    args.gamma.read_at(at, args.cols - at, args.wide, gamma);
    JAXTAP_UNROLL
    for (int i = 0; i < kRun; ++i) {
      const float normal = (of[1][i] - mean) * rsigma;
      out[i] = rsigma * (of[0][i] * gamma[i] - first - normal * second);
    }
    store<Format>(to + at, args.cols - at, args.wide, out);
  });
}

}  // namespace

void norm_gradient_rows(const NormGradient& given, Stream stream) {
  Args args = {};
  args.dz = given.dz;
  args.x = given.x;
  args.mean = given.kind == norms::Kind::kRms ? nullptr : given.mean;
  args.rsigma = given.rsigma;
  args.gamma = gamma_of(given);
  args.dx = given.dx;
  args.rows = given.rows;
  args.cols = given.cols;
  args.wide = given.cols % kRun == 0 && args.gamma.wide(kRun) &&
              aligned(16, static_cast<const char*>(given.dz), static_cast<const char*>(given.x),
                      static_cast<char*>(given.dx));
  by_float(given.dtype, [&](auto of) {
    launch_rows(args, kNormOfWarp, kNormOfBlock, stream, [](auto team, auto values) {
      return norm_gradient_rows_kernel<decltype(of), decltype(team)::value, decltype(values)::value>;
    });
  });
}

void norm_backward(const NormGradient& args, Stream stream) {
  norm_gradient_rows(args, stream);
  norm_gradient_weights(args, stream);
}

}  // namespace jaxtap::cuda
