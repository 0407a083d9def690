// Quantizing for training on buffers of exactly their size, at odd addresses, at edge sizes,
// against double and against random words that are published.
#include "training/quantize_int8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using training::Noise;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

// One by one, as the paper has it.
uint32_t random_word(const uint32_t* key, uint32_t index) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  uint32_t x = keys[0], y = index + keys[1];
  for (uint32_t i = 0; i < 5; ++i) {
    for (int rotation : kRotations[i % 2]) {
      x += y;
      y = (y << rotation | y >> (32 - rotation)) ^ x;
    }
    x += keys[(i + 1) % 3];
    y += keys[(i + 2) % 3] + i + 1;
  }
  return x ^ y;
}

TEST(random_words_of_threefry) {
  // Of the paper's test vectors: counter (0, 0), key (0, 0) gives 6b200159 99ba4efe.
  const uint32_t zero[2] = {};
  CHECK(random_word(zero, 0) == (0x6b200159u ^ 0x99ba4efeu));
  const uint32_t key[2] = {0x13198a2eu, 0x03707344u};
  std::vector<float> found(training::kDrawn);
  for (int64_t count : {1, 15, 65, 512}) {
    training::table().draw(Noise::kUniform, key, 4294967000u, count, found.data());
    bool good = true;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t word = random_word(key, 4294967000u + static_cast<uint32_t>(i));
      const double want = std::max((word >> 9) * 0x1p-23 - 0.5, -0.5 + 0x1p-24);
      good = good && static_cast<double>(found[static_cast<size_t>(i)]) == want;
    }
    CHECK(good);
  }
}

struct Case {
  int64_t groups, blocks, rows, columns;
  DType dtype;
  bool by_row, factors;
  Noise noise;
};

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel) {
  if (!takes_case()) return;
  const int64_t blocks = c.groups * c.blocks, size = blocks * c.rows * c.columns;
  const int64_t lines = blocks * c.rows, along = blocks * (c.by_row ? c.columns : c.rows);
  const int64_t slices = c.by_row ? lines : blocks * c.columns;
  const std::string what = std::to_string(c.groups) + " x " + std::to_string(c.blocks) + " x " +
                           std::to_string(c.rows) + " x " + std::to_string(c.columns) + ", " +
                           name(c.dtype) + (c.by_row ? ", by row" : ", by column") +
                           (c.factors ? ", factors" : "") + ", noise " +
                           std::to_string(static_cast<int>(c.noise));
  Buffer x(size * static_cast<int64_t>(byte_size(c.dtype)), c.dtype == DType::F32 ? 4 : 2);
  Buffer out(size, 1), scales(slices * 4, 4), factors(along * 4, 4), given(lines * 4, 4);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
  for (int64_t i = 0; i < size; ++i) set_element(x.get(), c.dtype, i, normal(random));
  for (int64_t i = 0; i < along; ++i) {
    set_element(factors.get(), DType::F32, i, 1.0f + uniform(random));
  }
  for (int64_t i = 0; i < lines; ++i) set_element(given.get(), DType::F32, i, uniform(random));
  std::vector<uint32_t> keys(static_cast<size_t>(2 * c.groups));
  for (uint32_t& word : keys) word = static_cast<uint32_t>(random());

  training::Args args;
  args.groups = c.groups;
  args.blocks = c.blocks;
  args.rows = c.rows;
  args.columns = c.columns;
  args.dtype = te::float_of(c.dtype);
  args.x = x.get();
  args.by_row = c.by_row;
  if (c.factors) args.factors = reinterpret_cast<const float*>(factors.get());
  args.noise = c.noise;
  if (c.noise == Noise::kGiven) args.given = reinterpret_cast<const float*>(given.get());
  if (c.noise == Noise::kUniform || c.noise == Noise::kLowBits) args.keys = keys.data();
  args.out = reinterpret_cast<int8_t*>(out.get());
  args.scales = reinterpret_cast<float*>(scales.get());
  training::quantize_int8(args, parallel);

  const auto slice_of = [&](int64_t i) {
    const int64_t line = i / c.columns;
    return c.by_row ? line : line / c.rows * c.columns + i % c.columns;
  };
  const auto number = [&](int64_t i) {
    const auto one = static_cast<float>(element(x.get(), c.dtype, i));
    if (!c.factors) return one;
    const int64_t line = i / c.columns;
    return one * args.factors[c.by_row ? line / c.rows * c.columns + i % c.columns : line];
  };
  std::vector<float> most(static_cast<size_t>(slices));
  for (int64_t i = 0; i < size; ++i) {
    float& one = most[static_cast<size_t>(slice_of(i))];
    one = std::max(one, std::fabs(number(i)));
  }
  bool good = true;
  for (int64_t i = 0; i < slices; ++i) {
    const float want = most[static_cast<size_t>(i)] * (1.0f / 127.0f);
    good = good && args.scales[i] == std::max(want, std::numeric_limits<float>::min());
  }
  CHECK_THAT(good, "scales, " + what);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t of_group = c.blocks * c.rows * c.columns;
    float noise = 0.0f;
    if (c.noise == Noise::kGiven) noise = args.given[i / c.columns];
    if (args.keys != nullptr) {
      const uint32_t word = random_word(args.keys + i / of_group * 2,
                                        static_cast<uint32_t>(i % of_group));
      noise = c.noise == Noise::kUniform
                  ? std::max(static_cast<float>(word >> 9) * 0x1p-23f - 0.5f, -0.5f + 0x1p-24f)
                  : (static_cast<float>(word & 0xff) + 0.5f) / 256 - 0.5f;
    }
    const float steps = std::nearbyint(number(i) * (1.0f / args.scales[slice_of(i)]) + noise);
    good = good && static_cast<float>(args.out[i]) == std::clamp(steps, -127.0f, 127.0f);
  }
  CHECK_THAT(good, what);
}

TEST(int8_of_rows_and_columns) {
  std::mt19937 random(21);
  Threads pool(2);
  const Parallel two(pool), one;
  for (DType dtype : kFloats) {
    for (bool by_row : {true, false}) {
      for (bool factors : {true, false}) {
        for (Noise noise : {Noise::kNone, Noise::kGiven, Noise::kUniform, Noise::kLowBits}) {
          for (int64_t columns : {0, 1, 3, 8, 15, 16, 17, 33, 64, 515, 1031}) {
            check_case({2, 1, 3, columns, dtype, by_row, factors, noise}, random, one);
          }
          check_case({1, 2, 0, 5, dtype, by_row, factors, noise}, random, one);
          check_case({3, 5, 33, 37, dtype, by_row, factors, noise}, random, two);
          check_case({1, 1, 200, 300, dtype, by_row, factors, noise}, random, two);
        }
      }
    }
  }
}

TEST(int8_of_what_is_not_finite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const uint32_t key[2] = {1, 2};
  for (int64_t count : {1, 16, 37}) {
    for (float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
      for (bool by_row : {true, false}) {
        std::vector<float> x(static_cast<size_t>(count), 3.0f);
        x.back() = bad;
        std::vector<int8_t> out(x.size(), 99);
        float scale = 0;
        training::Args args;
        args.rows = by_row ? 1 : count;
        args.columns = by_row ? count : 1;
        args.by_row = by_row;
        args.x = x.data();
        args.noise = Noise::kUniform;
        args.keys = key;
        args.out = out.data();
        args.scales = &scale;
        training::quantize_int8(args, Parallel());
        const int want = std::isnan(bad) ? 0 : bad > 0 ? 127 : -127;
        CHECK(out.back() == want && (count == 1 || out.front() == 0));
        CHECK(std::isnan(bad) ? std::isnan(scale) : scale == kInfinity);
      }
    }
  }
}

}  // namespace
