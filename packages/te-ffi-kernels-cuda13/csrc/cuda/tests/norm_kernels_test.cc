// The norms' CUDA kernels, on threads in software: against the CPU's, and quantized values against
// those of the same numbers.
#include <cmath>
#include <string>
#include <vector>

#include "cuda/kernels/norm.h"
#include "cuda/tests/kernels.h"
#include "cuda/tests/outputs.h"
#include "norms/norms.h"
#include "te/quantize.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using norms::Kind;

struct NormCase {
  int64_t rows, cols;
  DType dtype, weights;
  Kind kind;
  bool zero_centered, wide, bad;
  float middle;

  std::string text() const {
    return std::to_string(rows) + " x " + std::to_string(cols) + ", " + name(dtype) + ", " +
           name(weights) + (kind == Kind::kRms ? ", RMS" : ", layer") +
           (zero_centered ? ", zero-centered" : "") + (wide ? ", aligned" : "") +
           (bad ? ", not finite" : "") + ", about " + std::to_string(middle);
  }
};

struct Arrays {
  Arrays(const NormCase& c, std::mt19937& random)
      : x(numbers(c.rows * c.cols, c.dtype, c.wide, 1.5f, random)),
        gamma(numbers(c.cols, c.weights, c.wide, 1.0f, random)),
        beta(numbers(c.cols, c.weights, c.wide, 1.0f, random)),
        mean(4 * c.rows, 4),
        rsigma(4 * c.rows, 4),
        rest(4 * c.rows, 4) {
    for (int64_t i = 0; i < c.rows * c.cols; ++i) {
      const auto number = static_cast<float>(element(x.get(), c.dtype, i));
      set_element(x.get(), c.dtype, i, number + c.middle);
    }
    if (c.bad) spoil(x, c.rows * c.cols, c.dtype, random);
  }

  static float* floats(Buffer& buffer) { return reinterpret_cast<float*>(buffer.get()); }

  cuda::Norm norm(const NormCase& c) {
    cuda::Norm norm;
    norm.kind = c.kind;
    norm.zero_centered = c.zero_centered;
    norm.epsilon = 1e-3f;
    norm.x = x.get();
    norm.dtype = te::float_of(c.dtype);
    norm.gamma = gamma.get();
    norm.beta = c.kind == Kind::kRms ? nullptr : beta.get();
    norm.weights = te::float_of(c.weights);
    norm.rows = c.rows;
    norm.cols = c.cols;
    norm.mean = c.kind == Kind::kRms ? nullptr : floats(mean);
    norm.rsigma = floats(rsigma);
    return norm;
  }

  Buffer x, gamma, beta, mean, rsigma, rest;
};

// Whether arrays differ by little of their largest number.
bool close(const Buffer& found, const Buffer& wanted, DType dtype, int64_t count, double room) {
  double size = 1.0;
  for (int64_t i = 0; i < count; ++i) {
    const double one = std::fabs(element(wanted.get(), dtype, i));
    if (std::isfinite(one)) size = std::fmax(size, one);
  }
  const double step = dtype == DType::F32 ? 0.0 : dtype == DType::F16 ? 1e-3 : 8e-3;
  for (int64_t i = 0; i < count; ++i) {
    const double one = element(found.get(), dtype, i), other = element(wanted.get(), dtype, i);
    if (std::isnan(one) != std::isnan(other)) return false;
    if (std::isnan(one) || one == other) continue;
    if (!(std::fabs(one - other) <= step * std::fabs(other) + room * size)) return false;
  }
  return true;
}

void check_norm(const NormCase& c, std::mt19937& random) {
  if (!takes_case()) return;
  const std::string what = c.text();
  const int64_t size = c.rows * c.cols;
  const float before = random() % 2 == 0 ? 0.25f : 1000.0f;
  const bool counts = random() % 2 == 0, layer = c.kind == Kind::kLayer;
  Arrays arrays(c, random);

  Buffer found(size * bytes_of(c.dtype), misalign(c.dtype, c.wide)), amax(4, 4);
  set_element(amax.get(), DType::F32, 0, before);
  const cuda::Norm given = arrays.norm(c);
  cuda::Quantize outputs;
  outputs.dtype = given.dtype;
  outputs.rows = c.rows;
  outputs.cols = c.cols;
  outputs.scaling = te::Scaling::kNone;
  outputs.amax = outputs.updated_amax = Arrays::floats(amax);
  outputs.wants_absmax = counts;
  outputs.out = found.get();
  cuda::norm_forward(given, outputs, nullptr);

  Buffer mean(4 * c.rows, 4), rsigma(4 * c.rows, 4);
  Buffer wanted(size * bytes_of(c.dtype), misalign(c.dtype, c.wide));
  norms::Norm norm;
  norm.kind = c.kind;
  norm.zero_centered = c.zero_centered;
  norm.epsilon = given.epsilon;
  norm.x = given.x;
  norm.dtype = given.dtype;
  norm.gamma = given.gamma;
  norm.beta = given.beta;
  norm.weights = given.weights;
  norm.rows = c.rows;
  norm.cols = c.cols;
  norm.mean = layer ? Arrays::floats(mean) : nullptr;
  norm.rsigma = Arrays::floats(rsigma);
  const norms::Normalized source(norm, false, Parallel());
  te::Quantize args;
  args.source = &source;
  args.dtype = norm.dtype;
  args.rows = c.rows;
  args.cols = c.cols;
  args.scaling = te::Scaling::kNone;
  args.out = wanted.get();
  args.wants_absmax = true;
  const double most = static_cast<double>(te::quantize(args, Parallel()));
  CHECK_THAT(close(found, wanted, c.dtype, size, 2e-6), what);
  CHECK_THAT(close(arrays.rsigma, rsigma, DType::F32, c.rows, 1e-6), what + ": rsigma");
  if (layer) CHECK_THAT(close(arrays.mean, mean, DType::F32, c.rows, 2e-7), what + ": mean");
  const double updated = element(amax.get(), DType::F32, 0);
  const double largest = counts ? std::fmax(most, static_cast<double>(before)) : before;
  CHECK_THAT(updated == largest || std::fabs(updated - largest) <= 2e-6 * largest, what + ": amax");

  // Of the same statistics.
  Buffer dz = numbers(size, c.dtype, c.wide, 1.0f, random);
  const auto result = [&](int64_t count, DType dtype) {
    return Buffer(count * bytes_of(dtype), misalign(dtype, c.wide));
  };
  Buffer dx = result(size, c.dtype), wanted_dx = result(size, c.dtype);
  Buffer dgamma = result(c.cols, c.weights), wanted_dgamma = result(c.cols, c.weights);
  Buffer dbeta = result(c.cols, c.weights), wanted_dbeta = result(c.cols, c.weights);
  norms::Gradient undo;
  undo.kind = c.kind;
  undo.zero_centered = c.zero_centered;
  undo.dz = dz.get();
  undo.x = arrays.x.get();
  undo.dtype = norm.dtype;
  undo.mean = norm.mean;
  undo.rsigma = norm.rsigma;
  undo.gamma = norm.gamma;
  undo.weights = norm.weights;
  undo.rows = c.rows;
  undo.cols = c.cols;
  undo.dx = wanted_dx.get();
  undo.dgamma = wanted_dgamma.get();
  undo.dbeta = wanted_dbeta.get();
  norms::backward(undo, Parallel());
  cuda::NormGradient back;
  back.kind = undo.kind;
  back.zero_centered = undo.zero_centered;
  back.dz = undo.dz;
  back.x = undo.x;
  back.dtype = undo.dtype;
  back.mean = undo.mean;
  back.rsigma = undo.rsigma;
  back.gamma = undo.gamma;
  back.weights = undo.weights;
  back.rows = undo.rows;
  back.cols = undo.cols;
  back.dx = dx.get();
  back.dgamma = dgamma.get();
  back.dbeta = layer ? dbeta.get() : nullptr;
  cuda::norm_backward(back, nullptr);
  CHECK_THAT(close(dx, wanted_dx, c.dtype, size, 4e-6), what + ": dx");
  CHECK_THAT(close(dgamma, wanted_dgamma, c.weights, c.cols, 4e-6), what + ": dgamma");
  if (layer) CHECK_THAT(close(dbeta, wanted_dbeta, c.weights, c.cols, 4e-6), what + ": dbeta");
}

TEST(cuda_norms) {
  std::mt19937 random(11);
  int turn = 0;
  for (DType dtype : kFloats) {
    for (bool wide : {false, true}) {
      for (int64_t cols : {0, 1, 7, 64, 256, 257, 1000, 1024, 1032, 8192, 8200}) {
        for (Kind kind : {Kind::kLayer, Kind::kRms}) {
          const DType weights = random() % 2 == 0 ? dtype : DType::F32;
          if (cols > 1024) {  // blocks have a row each, and take long: not finite in turns
            const bool bad = turn++ / 2 % 2 == 0;
            check_norm({2, cols, dtype, weights, kind, random() % 2 == 0, wide, bad,
                        random() % 2 == 0 ? 0.0f : 2.0f},
                       random);
            continue;
          }
          const int64_t rows = cols > 257 ? 9 : 37;  // of which blocks have four each
          check_norm({rows, cols, dtype, weights, kind, random() % 2 == 0, wide, false,
                      random() % 2 == 0 ? 0.0f : 2.0f},
                     random);
          check_norm({5, cols, dtype, weights, kind, false, wide, true, 0.0f}, random);
        }
      }
      check_norm({0, 40, dtype, dtype, Kind::kLayer, false, wide, false, 0.0f}, random);
    }
  }
}

TEST(cuda_norm_of_numbers_far_from_zero) {
  std::mt19937 random(12);
  for (int64_t cols : {512, 4096, 10000}) {
    check_norm({2, cols, DType::F32, DType::F32, Kind::kLayer, false, true, false, 1e4f}, random);
  }
}

// The numbers that are quantized, of the statistics that were found.
std::vector<float> numbers_of(const NormCase& c, Arrays& arrays) {
  std::vector<float> out(static_cast<size_t>(c.rows * c.cols));
  const bool layer = c.kind == Kind::kLayer;
  for (int64_t i = 0; i < c.rows; ++i) {
    const float rsigma = Arrays::floats(arrays.rsigma)[i];
    const float mean = layer ? Arrays::floats(arrays.mean)[i] : 0.0f;
    const float rest = layer ? Arrays::floats(arrays.rest)[i] : 0.0f;
    for (int64_t j = 0; j < c.cols; ++j) {
      const auto x = static_cast<float>(element(arrays.x.get(), c.dtype, i * c.cols + j));
      const auto gamma = static_cast<float>(element(arrays.gamma.get(), c.weights, j));
      const auto beta = static_cast<float>(element(arrays.beta.get(), c.weights, j));
      const float product = (x - mean - rest) * rsigma * (c.zero_centered ? gamma + 1.0f : gamma);
      out[static_cast<size_t>(i * c.cols + j)] = layer ? product + beta : product;
    }
  }
  return out;
}

TEST(cuda_norm_values) {
  std::mt19937 random(13);
  each_outputs_case(random, [&](const OutputsCase& c) {
    const NormCase of = {c.rows, c.cols, c.dtype, random() % 2 == 0 ? c.dtype : DType::F32,
                         random() % 2 == 0 ? Kind::kRms : Kind::kLayer, random() % 2 == 0, c.wide,
                         random() % 4 == 0, 3.0f};
    Arrays arrays(of, random);
    cuda::Norm norm = arrays.norm(of);
    if (of.kind == Kind::kLayer) norm.rest = Arrays::floats(arrays.rest);
    const float before = random() % 2 == 0 ? 0.5f : 1000.0f;
    Results found(c.rows, c.cols, c.scaling, c.dtype, c.wide);
    cuda::norm_forward(norm, outputs_of(c, found, before), nullptr);
    check_outputs(c, found, numbers_of(of, arrays), before, c.text() + "; " + of.text());
  });
}

// What a norm is of doesn't depend on the dtype that its numbers have.
TEST(cuda_norms_of_the_same_numbers) {
  std::mt19937 random(14);
  for (int64_t cols : {40, 700, 3000, 9000}) {
    NormCase c = {2, cols, DType::BF16, DType::F32, Kind::kLayer, false, true, false, 3.0f};
    Arrays arrays(c, random);
    Buffer found(c.rows * cols * 4, 0), out(c.rows * cols * 4, 0), wide_x(c.rows * cols * 4, 0);
    Buffer means(4 * c.rows, 0), roots(4 * c.rows, 0);
    std::vector<float> amax(1);  // from the heap, as all that kernels read and write
    cuda::Quantize outputs;
    outputs.rows = c.rows;
    outputs.cols = cols;
    outputs.scaling = te::Scaling::kNone;
    outputs.amax = outputs.updated_amax = amax.data();
    outputs.out = out.get();
    cuda::Norm norm = arrays.norm(c);
    cuda::norm_forward(norm, outputs, nullptr);
    for (int64_t i = 0; i < c.rows * cols; ++i) {
      set_element(wide_x.get(), DType::F32, i,
                  static_cast<float>(element(arrays.x.get(), c.dtype, i)));
    }
    norm.x = wide_x.get();
    norm.dtype = te::Float::kF32;
    norm.mean = Arrays::floats(means);
    norm.rsigma = Arrays::floats(roots);
    outputs.out = found.get();
    cuda::norm_forward(norm, outputs, nullptr);
    CHECK(same(arrays.mean, means) && same(arrays.rsigma, roots));
    bool rounded = true;
    for (int64_t i = 0; i < c.rows * cols; ++i) {
      const auto number = static_cast<float>(element(found.get(), DType::F32, i));
      rounded = rounded && static_cast<double>(bf16_to_f32(f32_to_bf16(number))) ==
                               element(out.get(), DType::BF16, i);
    }
    CHECK(rounded);
  }
}

}  // namespace

#endif
