// Fake quantization on buffers of exactly their size, at odd addresses, at edge sizes, against
// double.
#include "fakequant/fake_quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Three ranges of [-2, 4] before, with half the weight in the next sum.
constexpr fakequant::Terms kTerms = {{-3, 6}, {2, 2}, {-6, 12}, {3, 3}, {3, 3}};
constexpr fakequant::Terms kNothing = {{0, 0}, {1, 1}, {0, 0}, {1, 1}, {0, 0}};

struct Case {
  int64_t indices, numbers;
  DType dtype;
  fakequant::Options options;
  int64_t blocks = 1, rows = 1;  // for the bits
};

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel) {
  const int64_t size = c.indices * c.numbers;
  const std::string what = std::to_string(c.indices) + " x " + std::to_string(c.numbers) + ", " +
                           name(c.dtype) + ", " + std::to_string(c.options.bits) + " bits" +
                           (c.options.symmetric ? ", symmetric" : "") +
                           (c.options.join ? ", joined" : "") + ", " + std::to_string(c.rows) +
                           " rows of bits";
  Buffer x(size * static_cast<int64_t>(byte_size(c.dtype)), c.dtype == DType::F32 ? 4 : 2);
  Buffer out(x.size(), c.dtype == DType::F32 ? 8 : 6);
  const int64_t columns = size / (c.blocks * c.rows), groups = (c.rows + 7) / 8;
  Buffer inside(c.blocks * groups * columns, 1);
  std::normal_distribution<float> normal(0.5f, 3.0f);
  for (int64_t i = 0; i < size; ++i) set_element(x.get(), c.dtype, i, normal(random));
  float bounds[2], seen[2] = {-0.25f, 9.0f};
  fakequant::Args args;
  args.options = c.options;
  args.indices = c.indices;
  args.numbers = c.numbers;
  args.dtype = te::float_of(c.dtype);
  args.x = x.get();
  args.terms = &kTerms;
  args.seen = args.observed = seen;
  args.out = out.get();
  args.inside = inside.get();
  args.blocks = c.blocks;
  args.rows = c.rows;
  args.columns = columns;
  args.bounds = bounds;
  fakequant::fake_quantize(args, parallel);

  double lower = 0, upper = 0;
  for (int64_t i = 0; i < c.indices; ++i) {
    double low = 0, high = 0;
    for (int64_t j = 0; j < c.numbers; ++j) {
      const double one = element(x.get(), c.dtype, i * c.numbers + j);
      low = std::min(low, one);
      high = std::max(high, one);
    }
    if (c.options.symmetric) low = -(high = std::max(-low, high));
    lower += low / static_cast<double>(c.indices);
    upper += high / static_cast<double>(c.indices);
  }
  if (c.options.join) {
    lower = std::min(lower, -0.25);
    upper = std::max(upper, 9.0);
  }
  const double share = static_cast<double>(c.options.share);
  const double average[2] = {(-3 + share * lower) / 2, (6 + share * upper) / 2};
  const auto close = [](double found, double wanted) {
    return std::fabs(found - wanted) <= 1e-5 * (1 + std::fabs(wanted));
  };
  CHECK_THAT(close(seen[0], lower) && close(seen[1], upper), "seen, " + what);
  CHECK_THAT(close(bounds[0], average[0]) && close(bounds[1], average[1]), "bounds, " + what);

  const double most = std::ldexp(1.0, c.options.bits - 1) - 1;
  const double least = c.options.symmetric ? -most : -most - 1;
  const double range = c.options.symmetric ? bounds[1] : bounds[1] - bounds[0];
  const double scale = range / (c.options.symmetric ? most : most - least);
  const double exact = c.options.symmetric ? 0 : least - bounds[0] / scale;
  // Next to a half, either neighbour: of the zero point, and of a number.
  const auto is_tie = [](double steps, double rounded) {
    return std::fabs(std::fabs(steps - rounded) - 0.5) < 1e-3 + 1e-6 * std::fabs(steps);
  };
  double zero = std::nearbyint(exact);
  if (is_tie(exact, zero) && size > 0) {
    double lowest = 0;
    for (int64_t i = 0; i < size; ++i) lowest = std::min(lowest, element(out.get(), c.dtype, i));
    const double other = zero + (exact > zero ? 1 : -1);
    const auto gap = [&](double point) { return std::fabs(lowest - (least - point) * scale); };
    if (gap(other) < gap(zero)) zero = other;
  }
  const double slack = c.dtype == DType::F32 ? 1e-5 : c.dtype == DType::F16 ? 1e-3 : 8e-3;
  const auto in_dtype = [&](float bound) {
    uint8_t bytes[4];
    set_element(bytes, c.dtype, 0, bound);
    return element(bytes, c.dtype, 0);
  };
  bool good = true;
  for (int64_t i = 0; i < size; ++i) {
    const double one = element(x.get(), c.dtype, i), found = element(out.get(), c.dtype, i);
    const double steps = std::clamp(one / scale, least - zero, most - zero);
    const double near = std::nearbyint(steps);
    const bool tie = is_tie(steps, near);
    // Bounds are of the dtype of x.
    const bool in = one >= in_dtype(bounds[0]) && one <= in_dtype(bounds[1]);
    const int64_t row = i / columns % c.rows;
    const int64_t at = (i / columns / c.rows * groups + row / 8) * columns + i % columns;
    good = good && (inside.get()[at] >> row % 8 & 1) == in && std::fabs(found - near * scale) <=
                       slack * (1 + std::fabs(near * scale)) + (tie ? scale * 1.001 : 0);
  }
  CHECK_THAT(good, what);
}

TEST(fake_quantization_of_ranges) {
  std::mt19937 random(12);
  Threads pool(2);
  const Parallel two(pool), one;
  for (DType dtype : kFloats) {
    for (bool symmetric : {false, true}) {
      for (int64_t numbers : {0, 1, 3, 15, 16, 17, 33, 64, 130, 1031}) {
        check_case({1, numbers, dtype, {8, symmetric, true, false, 1.0f}}, random, one);
        check_case({5, numbers, dtype, {4, symmetric, true, true, 0.25f}}, random, one);
        check_case({300, numbers, dtype, {16, symmetric, true, false, 0.5f}}, random, two);
      }
      check_case({1, 50000, dtype, {8, symmetric, true, false, 1.0f}}, random, two);
      check_case({3, 20000, dtype, {8, symmetric, true, true, 1.0f}}, random, two);
      for (int64_t rows : {1, 5, 8, 9, 16, 23}) {
        for (int64_t columns : {1, 16, 37, 1500}) {
          const int64_t numbers = 2 * rows * columns;
          check_case({2, numbers, dtype, {8, symmetric, true, false, 1.0f}, 4, rows}, random, two);
        }
      }
    }
  }
}

struct Small {
  std::vector<float> x, out;
  std::vector<uint8_t> inside;
  float bounds[2] = {}, seen[2] = {kInfinity, -kInfinity};
  fakequant::Args args;

  explicit Small(std::vector<float> given) : x(std::move(given)), out(x.size()), inside(x.size()) {
    args.options.symmetric = false;
    args.indices = 1;
    args.numbers = args.columns = static_cast<int64_t>(x.size());
    args.x = x.data();
    args.out = out.data();
    args.inside = inside.data();
    args.bounds = bounds;
    args.observed = seen;
  }
  bool has_bounds(float lower, float upper) const {
    return bounds[0] == lower && bounds[1] == upper;
  }
};

TEST(fake_quantization_of_what_is_not_finite) {
  for (int64_t count : {1, 16, 37}) {
    for (float bad : {kNan, kInfinity, -kInfinity}) {
      Small one(std::vector<float>(static_cast<size_t>(count), 3.0f));
      one.x.back() = bad;
      one.args.terms = &kTerms;
      one.args.options.observe = true;
      fakequant::fake_quantize(one.args, Parallel());
      // The side that isn't finite is as it was; NaN is on both.
      const bool low = std::isfinite(one.seen[0]), high = std::isfinite(one.seen[1]);
      CHECK(low == (bad > 0) && high == (bad < 0));
      CHECK(one.has_bounds(low ? -1.5f : -2.0f, !high ? 4.0f : count == 1 ? 3.0f : 4.5f));
      CHECK(std::isnan(bad) ? std::isnan(one.out.back()) : std::isfinite(one.out.back()));
    }
  }
}

TEST(fake_quantization_without_observing) {
  Small one({-1.0f, 0.25f, 8.0f});
  // The range of x where there is no other, and is not written down.
  one.args.terms = &kNothing;
  fakequant::fake_quantize(one.args, Parallel());
  CHECK(one.has_bounds(-1.0f, 8.0f) && one.seen[0] == kInfinity);
  // Earlier ones.
  one.args.terms = &kTerms;
  fakequant::fake_quantize(one.args, Parallel());
  CHECK(one.has_bounds(-2.0f, 4.0f) && one.out[2] <= 4.1f);
  // And that of this step.
  one.args.seen = one.seen;
  fakequant::fake_quantize(one.args, Parallel());
  CHECK(one.has_bounds(-2.0f, 4.0f));
  one.seen[0] = -5.0f;
  one.seen[1] = 6.0f;
  fakequant::fake_quantize(one.args, Parallel());
  CHECK(one.has_bounds(-4.0f, 6.0f) && one.seen[1] == 6.0f);
}

}  // namespace
