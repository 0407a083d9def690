// vexp and vlog1p_to_one against the same in double.
#include "common/vmath.h"

#include <cmath>
#include <limits>

#include "tests/check.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The distance of a float from a number, in units of the last place of that number as a float.
double ulps(float found, double wanted) {
  const int exponent = std::max(std::ilogb(wanted), -126);
  return std::fabs(static_cast<double>(found) - wanted) / std::ldexp(1.0, exponent - 23);
}

TEST(vmath_exp_over_its_range) {
  // From the least normal result to the greatest, at a step that hits no pattern of bits.
  double worst = 0;
  long steps = 0;
  for (float x = -87.3365f; x < 88.7228f; x += 1.9e-4f, ++steps) {
    const double wanted = std::exp(static_cast<double>(x));
    if (wanted < 1.17549435e-38 || wanted > 3.4028234e38) continue;
    worst = std::fmax(worst, ulps(vexp(x), wanted));
  }
  CHECK(steps > 800000);
  CHECK_THAT(worst <= 1.5, "off by " + std::to_string(worst) + " ulp");
  // Around zero, where the result is near 1.
  worst = 0;
  for (int exponent = -60; exponent <= 0; ++exponent) {
    for (int i = 0; i < 64; ++i) {
      const float x = std::ldexp(1.0f + static_cast<float>(i) / 64.0f, exponent);
      for (float at : {x, -x}) {
        worst = std::fmax(worst, ulps(vexp(at), std::exp(static_cast<double>(at))));
      }
    }
  }
  CHECK_THAT(worst <= 1.5, "off by " + std::to_string(worst) + " ulp near 0");
}

TEST(vmath_exp_at_its_ends) {
  CHECK(vexp(0.0f) == 1.0f);
  CHECK(vexp(-0.0f) == 1.0f);
  CHECK(vexp(kInfinity) == kInfinity);
  CHECK(vexp(-kInfinity) == 0.0f);
  CHECK(std::isnan(vexp(std::numeric_limits<float>::quiet_NaN())));
  CHECK(std::isnan(vexp(-std::numeric_limits<float>::quiet_NaN())));
  // Overflow: from the logarithm of the greatest float on.
  CHECK(std::isfinite(vexp(88.722f)));
  for (float x : {88.723f, 89.0f, 90.0f, 1e4f, std::numeric_limits<float>::max()}) {
    CHECK_THAT(vexp(x) == kInfinity, std::to_string(x));
  }
  // Underflow: subnormal, then zero from half of the least subnormal on.
  for (float x : {-104.0f, -105.0f, -1e4f, -std::numeric_limits<float>::max()}) {
    CHECK_THAT(vexp(x) == 0.0f, std::to_string(x));
  }
  double worst = 0;
  for (float x = -103.9f; x < -87.4f; x += 1e-3f) {
    worst = std::fmax(worst, ulps(vexp(x), std::exp(static_cast<double>(x))));
  }
  CHECK_THAT(worst <= 1.5, "off by " + std::to_string(worst) + " ulp where it's subnormal");
}

TEST(vmath_exp_is_vectorised_alike) {
  // The same bits from a loop that a compiler makes vectors of as one by one.
  float x[256], found[256];
  for (int i = 0; i < 256; ++i) x[i] = static_cast<float>(i - 128) * 0.83f;
  for (int i = 0; i < 256; ++i) found[i] = vexp(x[i]);
  bool same = true;
  for (int i = 0; i < 256; ++i) {
    volatile float one = x[i];
    same = same && float_bits(vexp(one)) == float_bits(found[i]);
  }
  CHECK(same);
}

TEST(vmath_log1p_to_one) {
  double worst = 0;
  for (int i = 1; i <= 100000; ++i) {
    const float x = static_cast<float>(i) / 100000.0f;
    worst = std::fmax(worst, ulps(vlog1p_to_one(x), std::log1p(static_cast<double>(x))));
    const float small = std::ldexp(x, -20);
    worst = std::fmax(worst, ulps(vlog1p_to_one(small), std::log1p(static_cast<double>(small))));
  }
  CHECK_THAT(worst <= 2.0, "off by " + std::to_string(worst) + " ulp");
  CHECK(vlog1p_to_one(0.0f) == 0.0f);
  CHECK(std::isnan(vlog1p_to_one(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
