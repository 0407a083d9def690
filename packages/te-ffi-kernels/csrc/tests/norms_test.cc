// Norms on buffers of exactly their size, at odd addresses, at edge sizes, against double.
#include <cmath>

#include "norms/norms.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using norms::Kind;
using te::Scaling;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

Buffer floats(int64_t count, DType dtype) {
  return Buffer(count * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
}

Buffer random_numbers(int64_t count, DType dtype, float middle, std::mt19937& random) {
  Buffer buffer = floats(count, dtype);
  std::normal_distribution<float> normal(middle, 2.0f);
  for (int64_t i = 0; i < count; ++i) set_element(buffer.get(), dtype, i, normal(random));
  return buffer;
}

struct Case {
  int64_t rows, cols;
  DType dtype, weights;
  Kind kind;
  bool zero_centered;

  std::string text() const {
    return std::to_string(rows) + " x " + std::to_string(cols) + ", " + name(dtype) + ", " +
           name(weights) + (kind == Kind::kRms ? ", rms" : ", layer");
  }
};

double step_of(DType dtype) {
  return dtype == DType::F32 ? 3e-7 : dtype == DType::F16 ? 5e-4 : 4e-3;
}

struct Forward {
  Forward(const Case& c, std::mt19937& random, const Parallel& parallel)
      : x(random_numbers(c.rows * c.cols, c.dtype, 50.0f, random)),
        gamma(random_numbers(c.cols, c.weights, 1.0f, random)),
        beta(random_numbers(c.cols, c.weights, 0.0f, random)),
        mean(4 * c.rows, 4),
        rsigma(4 * c.rows, 4),
        out(floats(c.rows * c.cols, c.dtype)) {
    norm.kind = c.kind;
    norm.zero_centered = c.zero_centered;
    norm.epsilon = 1e-5f;
    norm.x = x.get();
    norm.dtype = te::float_of(c.dtype);
    norm.gamma = gamma.get();
    norm.beta = beta.get();
    norm.weights = te::float_of(c.weights);
    norm.rows = c.rows;
    norm.cols = c.cols;
    norm.mean = c.kind == Kind::kRms ? nullptr : reinterpret_cast<float*>(mean.get());
    norm.rsigma = reinterpret_cast<float*>(rsigma.get());
    const norms::Normalized source(norm, false, parallel);
    te::Quantize args = of(source);
    args.scaling = Scaling::kNone;
    args.out = out.get();
    te::quantize(args, parallel);
  }

  te::Quantize of(const te::Source& source) const {
    te::Quantize args;
    args.source = &source;
    args.dtype = norm.dtype;
    args.rows = norm.rows;
    args.cols = norm.cols;
    return args;
  }

  Buffer x, gamma, beta, mean, rsigma, out;
  norms::Norm norm;
};

struct Row {
  double mean, rsigma;
};

Row moments(const Case& c, const uint8_t* x, int64_t row) {
  double mean = 0, square = 0;
  const auto at = [&](int64_t i) { return element(x, c.dtype, row * c.cols + i); };
  if (c.kind == Kind::kLayer) {
    for (int64_t i = 0; i < c.cols; ++i) mean += at(i) / static_cast<double>(c.cols);
  }
  for (int64_t i = 0; i < c.cols; ++i) square += (at(i) - mean) * (at(i) - mean);
  return {mean, 1 / std::sqrt(square / static_cast<double>(c.cols) + 1e-5)};
}

void check_forward(const Case& c, const Forward& f) {
  bool good = true;
  for (int64_t r = 0; r < c.rows; ++r) {
    const Row row = moments(c, f.x.get(), r);
    const double rsigma = element(f.rsigma.get(), DType::F32, r);
    good = good && std::fabs(rsigma - row.rsigma) <= 3e-6 * row.rsigma;
    if (c.kind == Kind::kLayer) {
      const double mean = element(f.mean.get(), DType::F32, r);
      good = good && std::fabs(mean - row.mean) <= 1e-6 * std::fabs(row.mean);
    }
    for (int64_t i = 0; i < c.cols; ++i) {
      const double gamma = element(f.gamma.get(), c.weights, i) + (c.zero_centered ? 1 : 0);
      const double beta = c.kind == Kind::kRms ? 0 : element(f.beta.get(), c.weights, i);
      const double part =
          (element(f.x.get(), c.dtype, r * c.cols + i) - row.mean) * row.rsigma * gamma;
      const double found = element(f.out.get(), c.dtype, r * c.cols + i);
      const double most = std::fabs(part) + std::fabs(beta);
      good = good && std::fabs(found - part - beta) <=
                         step_of(c.dtype) * std::fabs(part + beta) + 1e-5 * std::fabs(gamma) +
                             3e-6 * most + (c.dtype == DType::F16 ? 1e-7 : 0);
    }
  }
  CHECK_THAT(good, c.text());
}

void check_backward(const Case& c, const Forward& f, std::mt19937& random,
                    const Parallel& parallel) {
  const Buffer dz = random_numbers(c.rows * c.cols, c.dtype, 0.0f, random);
  Buffer dx = floats(c.rows * c.cols, c.dtype);
  Buffer dgamma = floats(c.cols, c.weights), dbeta = floats(c.cols, c.weights);
  norms::Gradient args;
  args.kind = c.kind;
  args.zero_centered = c.zero_centered;
  args.dz = dz.get();
  args.x = f.x.get();
  args.dtype = te::float_of(c.dtype);
  args.mean = f.norm.mean;
  args.rsigma = f.norm.rsigma;
  args.gamma = f.gamma.get();
  args.weights = te::float_of(c.weights);
  args.rows = c.rows;
  args.cols = c.cols;
  args.dx = dx.get();
  args.dgamma = dgamma.get();
  args.dbeta = dbeta.get();
  norms::backward(args, parallel);

  bool good = true;
  const auto n = static_cast<double>(c.cols);
  std::vector<double> gammas(static_cast<size_t>(c.cols)), betas(gammas), sizes(gammas);
  for (int64_t r = 0; r < c.rows; ++r) {
    const double rsigma = element(f.rsigma.get(), DType::F32, r);
    const double mean = c.kind == Kind::kRms ? 0 : element(f.mean.get(), DType::F32, r);
    double first = 0, second = 0, most = 0;
    const auto slope_of = [&](int64_t i) { return element(dz.get(), c.dtype, r * c.cols + i); };
    const auto gamma_of = [&](int64_t i) {
      return element(f.gamma.get(), c.weights, i) + (c.zero_centered ? 1 : 0);
    };
    const auto normal_of = [&](int64_t i) {
      return (element(f.x.get(), c.dtype, r * c.cols + i) - mean) * rsigma;
    };
    for (int64_t i = 0; i < c.cols; ++i) {
      const auto at = static_cast<size_t>(i);
      const double part = slope_of(i) * gamma_of(i);
      first += part / n;
      second += part * normal_of(i) / n;
      most += std::fabs(part) * (1 + std::fabs(normal_of(i))) / n;
      gammas[at] += slope_of(i) * normal_of(i);
      betas[at] += slope_of(i);
      sizes[at] += std::fabs(slope_of(i)) * (1 + std::fabs(normal_of(i)));
    }
    if (c.kind == Kind::kRms) first = 0;
    for (int64_t i = 0; i < c.cols; ++i) {
      const double part = slope_of(i) * gamma_of(i);
      const double wanted = rsigma * (part - first - normal_of(i) * second);
      const double size = rsigma * (std::fabs(part) + most * (1 + std::fabs(normal_of(i))));
      const double found = element(dx.get(), c.dtype, r * c.cols + i);
      good = good && std::fabs(found - wanted) <=
                         step_of(c.dtype) * std::fabs(wanted) + 3e-6 * size + 1e-6;
    }
  }
  for (int64_t i = 0; i < c.cols; ++i) {
    const auto at = static_cast<size_t>(i);
    const double room = 1e-6 * sizes[at] + 1e-6;
    good = good && std::fabs(element(dgamma.get(), c.weights, i) - gammas[at]) <=
                       step_of(c.weights) * std::fabs(gammas[at]) + room;
    if (c.kind == Kind::kRms) continue;
    good = good && std::fabs(element(dbeta.get(), c.weights, i) - betas[at]) <=
                       step_of(c.weights) * std::fabs(betas[at]) + room;
  }
  CHECK_THAT(good, c.text());
}

// Quantized values of numbers that are computed are those of the same numbers in an array.
void check_values(const Case& c, const Forward& f, const Parallel& parallel) {
  if (c.dtype != DType::F32) return;
  const int64_t size = c.rows * c.cols;
  for (Scaling scaling : {Scaling::kDelayedTensor, Scaling::kChannel, Scaling::kMx}) {
    const bool mx = scaling == Scaling::kMx;
    for (int layout = 0; layout < 3; ++layout) {
      const bool rows = layout != 1, columns = layout != 0;
      if (mx && ((rows && c.cols % 32 != 0) || (columns && c.rows % 32 != 0))) continue;
      Buffer qvalues[2] = {Buffer(size, 1), Buffer(size, 3)};
      Buffer colwise[2] = {Buffer(size, 1), Buffer(size, 3)};
      Buffer scales[2] = {Buffer(4 * (size / 32 + c.rows), 4), Buffer(4 * (size / 32 + c.rows), 4)};
      Buffer others[2] = {Buffer(4 * (size / 32 + c.cols), 4), Buffer(4 * (size / 32 + c.cols), 4)};
      const norms::Normalized source(f.norm, columns, parallel);
      float most[2];
      for (int i = 0; i < 2; ++i) {
        te::Quantize args = f.of(source);
        if (i == 1) {
          args.source = nullptr;
          args.x = f.out.get();
        }
        args.scaling = scaling;
        args.scale = 3.0f;
        if (rows) args.qvalues = qvalues[i].get();
        if (rows) args.scales = scales[i].get();
        if (columns) args.colwise = colwise[i].get();
        if (columns) args.colwise_scales = others[i].get();
        args.wants_absmax = true;
        most[i] = te::quantize(args, parallel);
      }
      const auto same = [](const Buffer* both) {
        return std::memcmp(both[0].get(), both[1].get(), static_cast<size_t>(both[0].size())) == 0;
      };
      CHECK_THAT(same(qvalues) && same(colwise) && same(scales) && same(others), c.text());
      CHECK_THAT(most[0] == most[1], c.text());
    }
  }
}

TEST(norms) {
  std::mt19937 random(11);
  Threads pool(2);
  const Parallel two(pool), one;
  for (Kind kind : {Kind::kLayer, Kind::kRms}) {
    for (DType dtype : kFloats) {
      for (int64_t rows : {0, 1, 5, 32, 70}) {
        for (int64_t cols : {1, 15, 64, 65, 513, 1056, 2080}) {
          for (DType weights : {DType::F32, dtype}) {
            const Case c{rows, cols, dtype, weights, kind, rows == 5};
            const Parallel& parallel = rows == 70 ? two : one;
            const Forward f(c, random, parallel);
            check_forward(c, f);
            check_backward(c, f, random, parallel);
            check_values(c, f, parallel);
          }
        }
      }
    }
  }
}

TEST(norms_of_nothing) {
  std::mt19937 random(12);
  const Case c{3, 0, DType::F32, DType::F32, Kind::kLayer, false};
  const Forward f(c, random, Parallel());
  CHECK(std::isnan(element(f.rsigma.get(), DType::F32, 2)));
  CHECK(throws<Error>([] { norms::kind_of(2); }, "norm_type must ... got 2"));
}

// Far from zero, where squares minus a square would leave nothing.
TEST(norms_of_a_large_mean) {
  const Case c{2, 777, DType::F32, DType::F32, Kind::kLayer, false};
  std::mt19937 random(13);
  Forward f(c, random, Parallel());
  std::normal_distribution<float> normal(3e4f, 0.5f);
  for (int64_t i = 0; i < 2 * 777; ++i) set_element(f.x.get(), DType::F32, i, normal(random));
  const norms::Normalized source(f.norm, true, Parallel());
  for (int64_t r = 0; r < 2; ++r) {
    const Row row = moments(c, f.x.get(), r);
    const double found = element(f.rsigma.get(), DType::F32, r);
    CHECK(std::fabs(found - row.rsigma) <= 2e-6 * row.rsigma);
    std::vector<float> out(777);
    source.load(r, 1, 0, 777, out.data(), 777);
    for (int64_t i = 0; i < 777; ++i) {
      const double gamma = element(f.gamma.get(), DType::F32, i);
      const double beta = element(f.beta.get(), DType::F32, i);
      const double x = element(f.x.get(), DType::F32, r * 777 + i);
      const double wanted = (x - row.mean) * row.rsigma * gamma + beta;
      const double error = std::fabs(static_cast<double>(out[static_cast<size_t>(i)]) - wanted);
      CHECK(error <= 2e-6 * (std::fabs(wanted) + std::fabs(beta) + 3 * std::fabs(gamma)));
    }
  }
}

}  // namespace
