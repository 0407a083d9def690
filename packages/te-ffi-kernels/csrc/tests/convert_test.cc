// Conversions, against tables of all quantized values: the nearest one, of two equally near the
// even one.
#include "common/convert.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/check.h"
#include "tests/narrow.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

struct Format {
  int exponent, mantissa;
  uint32_t largest;  // finite number
  bool has_inf;

  // By the definition of such formats.
  double value(uint32_t encoded) const {
    const int bias = (1 << (exponent - 1)) - 1;
    const uint32_t fraction = encoded & ((1u << mantissa) - 1);
    const int power = static_cast<int>(encoded >> mantissa);
    const double ulp = std::ldexp(1.0, std::max(power, 1) - bias - mantissa);
    return ulp * (power == 0 ? fraction : fraction + (1u << mantissa));
  }

  // Nearest number of |x|, as if the format went on beyond the largest.
  uint32_t nearest(double x) const {
    uint32_t low = 0, high = largest + 1;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (value(middle) <= x ? low : high) = middle;
    }
    if (low == largest + 1 || x >= value(largest + 1)) return largest + 1;
    const double below = x - value(low), above = value(low + 1) - x;
    if (below != above) return below < above ? low : low + 1;
    return low % 2 == 0 ? low : low + 1;
  }
};

template <typename Encoded>
void check_format(const Format& f, float (*decode)(Encoded), Encoded (*encode)(float),
                  Encoded (*saturated)(float)) {
  const uint32_t sign = 1u << (f.exponent + f.mantissa);
  std::vector<float> values;
  for (uint32_t encoded = 0; encoded <= f.largest; ++encoded) {
    CHECK(static_cast<double>(decode(static_cast<Encoded>(encoded))) == f.value(encoded));
    CHECK(static_cast<double>(decode(static_cast<Encoded>(encoded | sign))) == -f.value(encoded));
    const float here = static_cast<float>(f.value(encoded));
    const float half = static_cast<float>((f.value(encoded) + f.value(encoded + 1)) / 2);
    for (float x : {here, half, std::nextafterf(half, 0.0f), std::nextafterf(half, INFINITY)}) {
      values.push_back(x);
    }
  }
  CHECK(std::isnan(decode(static_cast<Encoded>(sign - 1))));
  CHECK(std::isinf(decode(static_cast<Encoded>(f.largest + 1))) == f.has_inf);
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    const float x = bits_float(static_cast<uint32_t>(random()) & 0x7fffffffu);
    if (std::isfinite(x)) values.push_back(x);
  }
  for (float x : values) {
    const uint32_t nearest = f.nearest(static_cast<double>(x));
    const uint32_t over = f.has_inf ? f.largest + 1 : sign - 1;
    const uint32_t cast = nearest > f.largest ? over : nearest;
    const uint32_t clipped = std::min(nearest, f.largest);
    CHECK(encode(x) == cast);
    CHECK(encode(-x) == (cast | sign));
    if (saturated != nullptr) CHECK(saturated(x) == clipped && saturated(-x) == (clipped | sign));
  }
  CHECK(std::isnan(decode(encode(NAN))));
  const float inf = decode(encode(INFINITY));
  CHECK(f.has_inf ? std::isinf(inf) : std::isnan(inf));
  if (saturated != nullptr) {
    CHECK(saturated(INFINITY) == f.largest);
    CHECK(std::isnan(decode(saturated(NAN))));
  }
}

TEST(convert_f16) {
  check_format<uint16_t>({5, 10, 0x7bff, true}, f16_to_f32, f32_to_f16, nullptr);
}

TEST(convert_f8e4m3fn) {
  check_format<uint8_t>({4, 3, 0x7e, false}, f8e4m3fn_to_f32, f32_to_f8e4m3fn,
                        f32_to_f8e4m3fn_saturated);
}

TEST(convert_f8e5m2) {
  check_format<uint8_t>({5, 2, 0x7b, true}, f8e5m2_to_f32, f32_to_f8e5m2,
                        f32_to_f8e5m2_saturated);
}

TEST(convert_bf16) {
  check_format<uint16_t>({8, 7, 0x7f7f, true}, bf16_to_f32, f32_to_bf16, nullptr);
}

TEST(convert_e8m0) {
  for (int encoded = 0; encoded < 255; ++encoded) {
    const double power = std::ldexp(1.0, encoded - 127);
    const float x = static_cast<float>(power);
    CHECK(static_cast<double>(e8m0_to_f32(static_cast<uint8_t>(encoded))) == power);
    CHECK(f32_to_e8m0(x) == encoded);
    const float middle = static_cast<float>(1.5 * power);
    CHECK(f32_to_e8m0(middle) == encoded + 1);
    CHECK(f32_to_e8m0(std::nextafterf(middle, 0.0f)) == encoded);
  }
  for (float x : {0.0f, -0.0f, -1.0f, INFINITY, -INFINITY, NAN}) CHECK(f32_to_e8m0(x) == 255);
  CHECK(std::isnan(e8m0_to_f32(255)));
}

}  // namespace
