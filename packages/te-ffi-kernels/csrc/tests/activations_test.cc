// Activations on buffers of exactly their size, at odd addresses, at edge sizes, against double.
#include <cmath>

#include "activations/activations.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using activations::Activation;
using activations::Function;
using te::Scaling;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};
constexpr activations::Params kParams = {1.5f, 1.25f, 0.75f};

struct Point {
  double value, slope;
};

Point swish(double x, double u, double slope) {
  const double gate = 1 / (1 + std::exp(-u)), rest = 1 / (1 + std::exp(u));
  return {x * gate, gate + x * slope * gate * rest};
}

Point point(Function function, double x) {
  const double limit = static_cast<double>(kParams.limit), alpha = static_cast<double>(kParams.alpha);
  switch (function) {
    case Function::kGelu: {
      const double root = 2 * std::sqrt(2 / 3.14159265358979323846);
      return swish(x, root * (x + 0.044715 * x * x * x), root * (1 + 3 * 0.044715 * x * x));
    }
    case Function::kSigmoid: {
      const double gate = 1 / (1 + std::exp(-x));
      return {gate, gate / (1 + std::exp(x))};
    }
    case Function::kSilu:
      return swish(x, x, 1);
    case Function::kRelu:
      return {std::fmax(x, 0), x > 0 ? 1.0 : 0.0};
    case Function::kQuickGelu:
      return swish(x, 1.702 * x, 1.702);
    case Function::kSquaredRelu:
      return {std::fmax(x, 0) * std::fmax(x, 0), 2 * std::fmax(x, 0)};
    default: {
      const Point found = swish(std::fmin(x, limit), alpha * std::fmin(x, limit), alpha);
      return {found.value, x <= limit ? found.slope : 0};
    }
  }
}

Point gate(Function function, double x) {
  if (function != Function::kClampedSilu) return {x, 1};
  const double limit = static_cast<double>(kParams.limit);
  const double cut = std::fmin(std::fmax(x, -limit), limit);
  return {cut + static_cast<double>(kParams.offset), cut == x ? 1.0 : 0.0};
}

Buffer floats(int64_t count, DType dtype) {
  return Buffer(count * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
}

Buffer random_numbers(int64_t count, DType dtype, std::mt19937& random) {
  Buffer buffer = floats(count, dtype);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (int64_t i = 0; i < count; ++i) set_element(buffer.get(), dtype, i, normal(random));
  return buffer;
}

bool near(double found, double wanted, DType dtype) {
  const double step = dtype == DType::F32 ? 2e-6 : dtype == DType::F16 ? 5.2e-4 : 4e-3;
  return std::fabs(found - wanted) <= step * std::fabs(wanted) + (dtype == DType::F16 ? 1e-7 : 1e-6);
}

void check(int64_t number, int64_t rows, int64_t cols, DType dtype, std::mt19937& random,
           const Parallel& parallel) {
  if (!takes_case()) return;
  const Activation activation = activations::activation_of(number);
  const int64_t parts = activation.gated ? 2 : 1, size = rows * cols;
  const Buffer x = random_numbers(parts * size, dtype, random);
  const Buffer dz = random_numbers(size, dtype, random);
  activations::Operands operands;
  operands.activation = activation;
  operands.params = kParams;
  operands.dz = dz.get();
  operands.x = x.get();
  operands.dtype = te::float_of(dtype);
  operands.cols = cols;
  const activations::Activated forward(operands);
  const activations::Derived backward(operands);
  Buffer out = floats(size, dtype), dx = floats(parts * size, dtype);
  Buffer sums = floats(parts * cols, dtype);
  te::Quantize args;
  args.source = &forward;
  args.dtype = operands.dtype;
  args.rows = rows;
  args.cols = cols;
  args.scaling = Scaling::kNone;
  args.out = out.get();
  te::quantize(args, parallel);
  args.source = &backward;
  args.cols = parts * cols;
  args.out = dx.get();
  args.sums = sums.get();
  te::quantize(args, parallel);

  bool good = true;
  std::vector<double> totals(static_cast<size_t>(parts * cols)), sizes(totals);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < cols; ++i) {
      const int64_t at = r * parts * cols + i;
      const Point first = point(activation.function, element(x.get(), dtype, at));
      Point second = {1, 0};
      if (activation.gated) {
        second = gate(activation.function, element(x.get(), dtype, at + cols));
      }
      const double slope = element(dz.get(), dtype, r * cols + i);
      good = good && near(element(out.get(), dtype, r * cols + i), first.value * second.value,
                          dtype);
      const double all[] = {slope * first.slope * second.value,
                            slope * first.value * second.slope};
      for (int64_t part = 0; part < parts; ++part) {
        const auto to = static_cast<size_t>(part * cols + i);
        good = good && near(element(dx.get(), dtype, at + part * cols), all[part], dtype);
        totals[to] += all[part];
        sizes[to] += std::fabs(all[part]);
      }
    }
  }
  for (int64_t i = 0; i < parts * cols; ++i) {
    const auto at = static_cast<size_t>(i);
    const double room = 4e-3 * std::fabs(totals[at]) + 1e-6 * sizes[at] + 1e-6;
    good = good && std::fabs(element(sums.get(), dtype, i) - totals[at]) <= room;
  }
  const std::string what = std::to_string(number) + ", " + std::to_string(rows) + " x " +
                           std::to_string(cols) + ", " + name(dtype);
  CHECK_THAT(good, what);

  // Quantized values of numbers that are computed are those of the same numbers in an array.
  if (dtype != DType::F32) return;
  for (int gradient = 0; gradient < 2; ++gradient) {
    const int64_t width = gradient == 0 ? cols : parts * cols, count = rows * width;
    for (Scaling scaling : {Scaling::kDelayedTensor, Scaling::kChannel, Scaling::kMx}) {
      const bool mx = scaling == Scaling::kMx;
      for (int layout = 0; layout < 3; ++layout) {
        const bool by_row = layout != 1, by_column = layout != 0;
        if (mx && ((by_row && width % 32 != 0) || (by_column && rows % 32 != 0))) continue;
        Buffer qvalues[2] = {Buffer(count, 1), Buffer(count, 3)};
        Buffer colwise[2] = {Buffer(count, 1), Buffer(count, 3)};
        Buffer scales[2] = {Buffer(4 * (count / 32 + rows), 4), Buffer(4 * (count / 32 + rows), 4)};
        Buffer others[2] = {Buffer(4 * (count / 32 + width), 4),
                            Buffer(4 * (count / 32 + width), 4)};
        for (int i = 0; i < 2; ++i) {
          te::Quantize q;
          if (i == 0) {
            q.source = gradient == 0 ? static_cast<const te::Source*>(&forward) : &backward;
          } else {
            q.x = gradient == 0 ? out.get() : dx.get();
          }
          q.rows = rows;
          q.cols = width;
          q.scaling = scaling;
          q.scale = 3.0f;
          if (by_row) q.qvalues = qvalues[i].get();
          if (by_row) q.scales = scales[i].get();
          if (by_column) q.colwise = colwise[i].get();
          if (by_column) q.colwise_scales = others[i].get();
          te::quantize(q, parallel);
        }
        const auto same = [](const Buffer* both) {
          return std::memcmp(both[0].get(), both[1].get(), static_cast<size_t>(both[0].size())) ==
                 0;
        };
        CHECK_THAT(same(qvalues) && same(colwise) && same(scales) && same(others), what);
      }
    }
  }
}

TEST(activations) {
  std::mt19937 random(21);
  Threads pool(2);
  const Parallel two(pool), one;
  for (int64_t number = 0; number < 12; ++number) {
    for (DType dtype : kFloats) {
      for (int64_t rows : {0, 1, 33, 64}) {
        for (int64_t cols : {0, 1, 17, 96, 531, 2050}) {
          if (rows == 64 && cols == 2050) continue;
          check(number, rows, cols, dtype, random, rows == 64 ? two : one);
        }
      }
    }
  }
}

TEST(activations_in_tails) {
  const activations::Table& table = activations::table();
  const float inf = INFINITY, nan = NAN;
  const float x[] = {0.0f,   -0.0f, -5.0f,  -10.0f, -20.0f, -60.0f, -87.0f, -1e3f, -1e20f,
                     -3e38f, -inf,  10.0f,  60.0f,  1e3f,   1e20f,  3e38f,  inf,   nan};
  const int64_t n = sizeof(x) / sizeof(x[0]);
  for (int f = 0; f < activations::kFunctions; ++f) {
    float out[n], dx[n], ones[n];
    for (float& one : ones) one = 1.0f;
    table.forward[f](x, out, n, kParams);
    table.backward[f](ones, x, dx, n, kParams);
    for (int64_t i = 0; i < n; ++i) {
      const std::string what = std::to_string(f) + " at " + std::to_string(x[i]);
      if (x[i] != x[i]) {
        CHECK_THAT(out[i] != out[i], what);
        continue;
      }
      const double at = static_cast<double>(x[i]) ;
      Point wanted = point(static_cast<Function>(f), at);
      if (std::fabs(at) > 1e2 && static_cast<Function>(f) != Function::kSquaredRelu) {
        // The limits.
        const Point low = point(static_cast<Function>(f), -100.0);
        const Point high = point(static_cast<Function>(f), 100.0);
        if (at < 0) wanted = low;
        if (at > 0) wanted = {high.value == 100 ? at : high.value, high.slope};
      }
      const auto close = [&](float found, double value) {
        if (std::isinf(value) || value > 3.4e38) return std::isinf(found) && found > 0;
        return std::fabs(static_cast<double>(found) - value) <= 2e-5 * std::fabs(value) + 1e-36;
      };
      CHECK_THAT(close(out[i], wanted.value), what);
      CHECK_THAT(close(dx[i], wanted.slope), what + ", slope");
    }
  }
  CHECK(throws<Error>([] { activations::activation_of(12); }, "act_enum must ... got 12"));
}

}  // namespace
