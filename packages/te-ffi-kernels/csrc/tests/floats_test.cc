// Matmuls of many rows of bfloat16, against double arithmetic: on AMX and AVX512-BF16 they are made
// of bfloat16.
#include <algorithm>
#include <cmath>
#include <string>

#include "common/error.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

constexpr DType kBf16 = DType::BF16, kF32 = DType::F32, kF16 = DType::F16;

// Least numbers of rows for which AMX multiplies bfloat16.
int64_t least_rows(int bits, int64_t group) { return bits == 4 ? 16 : group != 0 ? 64 : 256; }

struct Case {
  int64_t m;
  const Weights& w;
  DType y_dtype;
  int digits = 0;

  std::string text() const {
    return "m=" + std::to_string(m) + " k=" + std::to_string(w.k) + " n=" + std::to_string(w.n) +
           " group=" + std::to_string(w.group) + " bits=" + std::to_string(w.bits) +
           " table=" + w.layout.table().name +
           " scale_bits=" + std::to_string(w.layout.scale_bits()) + " y=" + name(y_dtype) +
           " digits=" + std::to_string(digits);
  }
};

template <typename Draw>
Buffer rows_of(const Case& c, int64_t offset, const Draw& draw) {
  Buffer x(2 * c.m * c.w.k, 2 * offset);
  for (int64_t i = 0; i < c.m * c.w.k; ++i) set_element(x.get(), kBf16, i, draw());
  return x;
}

Buffer normal_rows(const Case& c, std::mt19937& random, int64_t offset) {
  std::normal_distribution<float> normal;
  return rows_of(c, offset, [&] { return normal(random); });
}

Buffer multiplied(const Case& c, const Buffer& x, Isa isa, const Parallel& parallel,
                  int64_t offset = 0) {
  const int64_t size = static_cast<int64_t>(byte_size(c.y_dtype));
  Buffer y(c.m * c.w.n * size, offset * size);
  Matmul args;
  args.x = x.get();
  args.x_dtype = kBf16;
  args.m = c.m;
  args.weights = c.w.packed();
  args.y = y.get();
  args.y_dtype = c.y_dtype;
  args.digits = c.digits;
  matmul(args, parallel, isa);
  return y;
}

// A row of x, in int8 with a scale for each group where that is asked for.
std::vector<double> row_of(const Case& c, const Buffer& x, int64_t row) {
  std::vector<double> values;
  for (int64_t i = 0; i < c.w.k; ++i) values.push_back(element(x.get(), kBf16, row * c.w.k + i));
  if (c.digits != 1) return values;
  for (size_t begin = 0; begin < values.size(); begin += static_cast<size_t>(c.w.group)) {
    const size_t end = begin + static_cast<size_t>(c.w.group);
    float largest = 0;
    for (size_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::fabs(static_cast<float>(values[i])));
    }
    const float scale = std::max(largest * (1.0f / 127.0f), 0x1p-126f);
    for (size_t i = begin; i < end; ++i) {
      const float qvalue = std::nearbyint(static_cast<float>(values[i]) / scale);
      values[i] = static_cast<double>(qvalue) * static_cast<double>(scale);
    }
  }
  return values;
}

// Of the sum of magnitudes: a weight without groups is exact but for its scale, and others are
// rounded to 8 digits. What other instruction sets do with x is closer.
void check_near(const Case& c, const Buffer& x, const Buffer& y, Isa isa) {
  const double both = c.digits == 1 ? 0x1p-7 : 0x1p-8;
  const double sums = isa == Isa::kAmx && c.w.group == 0 ? 0x1p-17 : both + 0x1p-17;
  const double stored = c.y_dtype == kF32 ? 0x1p-23 : c.y_dtype == kBf16 ? 0x1p-8 : 0x1p-11;
  for (int64_t r = 0; r < c.m; ++r) {
    const std::vector<double> row = row_of(c, x, r);
    for (int64_t j = 0; j < c.w.n; ++j) {
      double expected = 0, magnitude = 0;
      for (int64_t i = 0; i < c.w.k; ++i) {
        const double one =
            row[static_cast<size_t>(i)] * c.w.number(i, j) * static_cast<double>(c.w.scale(i, j));
        expected += one;
        magnitude += std::fabs(one);
      }
      const double got = element(y.get(), c.y_dtype, r * c.w.n + j);
      const double bound = sums * magnitude + stored * std::fabs(expected) + 0x1p-24;
      CHECK_THAT(std::fabs(got - expected) <= bound, c.text() + " on " + name(isa));
    }
  }
}

void check_normal(const Case& c, std::mt19937& random, const Parallel& parallel, int64_t offset) {
  if (!takes_case()) return;
  const Buffer x = normal_rows(c, random, offset);
  for (Isa isa : tested_isas()) {
    const Buffer y = multiplied(c, x, isa, parallel, offset);
    check_near(c, x, y, isa);
    const Buffer alone = multiplied(c, x, isa, Parallel(), offset);
    CHECK_THAT(std::memcmp(y.get(), alone.get(), static_cast<size_t>(y.size())) == 0,
               c.text() + " depends on threads on " + name(isa));
  }
}

TEST(floats_tables) {
  std::mt19937 random(35);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (const TableKind& table : kTableKinds) {
    for (int64_t group : {0, 8, 16, 32, 64}) {
      if (group == 0 && kTables[table.table_id].parts == 2) continue;
      for (int64_t n : {1, 40, 65}) {
        ++turn;
        const int64_t k = group == 0 ? 32 + turn % 70 : group * (1 + turn % 3);
        const PanelLayout layout = panel_layout(k, group, 4, table.scale_kind, table.table_id);
        const Weights w = random_weights(n, layout, random, turn % 4);
        check_normal({16 + turn % 18, w, kF32}, random, parallel, turn % 4);
        if (group != 0) check_normal({64, w, kF32, 1}, random, parallel, turn % 4);
      }
    }
  }
}

TEST(floats_groups) {
  std::mt19937 random(31);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (int64_t group : {8, 24, 32, 64, 128, 256}) {
    for (int64_t n : {1, 16, 40, 65}) {
      for (const auto& [bits, scale_bits] : {std::pair{4, 32}, std::pair{4, 16}, std::pair{8, 32}}) {
        ++turn;
        const PanelLayout layout = panel_layout(group * (1 + turn % 3), group, bits, scale_bits);
        const Weights w = random_weights(n, layout, random, turn % 4);
        const int64_t m = least_rows(bits, group) + turn % 18;
        const DType y_dtype = turn % 3 == 0 ? kF32 : turn % 3 == 1 ? kBf16 : kF16;
        check_normal({m, w, y_dtype}, random, parallel, turn % 4);
      }
    }
  }
}

// int8 by groups, with as many rows and fewer than AMX takes for bfloat16.
TEST(floats_rounded) {
  std::mt19937 random(38);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (int64_t group : {8, 24, 32, 64, 136}) {
    for (int64_t n : {1, 40, 65}) {
      for (int bits : {4, 8}) {
        ++turn;
        const Weights w = random_weights(group * (1 + turn % 3), n, group, bits, random, turn % 4);
        const DType y_dtype = turn % 3 == 0 ? kF32 : turn % 3 == 1 ? kBf16 : kF16;
        check_normal({60 + turn % 18, w, y_dtype, 1}, random, parallel, turn % 4);
      }
    }
  }
  const Weights large = random_weights(1056, 70, 32, 4, random, 1);
  check_normal({300, large, kF32, 1}, random, parallel, 1);
}

TEST(floats_without_groups) {
  std::mt19937 random(32);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (int64_t k : {1, 31, 32, 33, 63, 65, 130}) {
    for (int64_t n : {1, 17, 33, 48}) {
      for (const auto& [bits, scale_bits] : {std::pair{4, 32}, std::pair{4, 16}, std::pair{8, 32}}) {
        ++turn;
        const Weights w = random_weights(n, panel_layout(k, 0, bits, scale_bits), random, turn % 4);
        const int64_t m = least_rows(bits, 0) + turn % 18;
        check_normal({m, w, turn % 2 == 0 ? kF32 : kBf16}, random, parallel, turn % 4);
      }
    }
  }
}

// Several tasks of rows and of columns, blocks of K and of rows, and more than one slab of rows.
TEST(floats_large) {
  std::mt19937 random(33);
  Threads pool(3);
  const Parallel parallel(pool);
  const auto check = [&](int64_t m, int64_t k, int64_t n, int64_t group, int bits) {
    const Weights w = random_weights(k, n, group, bits, random, 1);
    check_normal({m, w, kF32}, random, parallel, 1);
  };
  check(450, 96, 70, 32, 4);
  check(300, 512, 200, 64, 4);
  check(300, 512, 200, 64, 8);
  check(257, 1100, 40, 0, 8);
  check(260, 33000, 2, 0, 4);
}

// Small integers, and scales that are powers of two: nothing is rounded.
TEST(floats_of_integers_are_exact) {
  std::mt19937 random(34);
  std::uniform_int_distribution<int> small(-8, 8), power(-3, 0);
  for (int bits : {4, 8}) {
    for (int64_t group : {0, 24, 32, 136}) {
      const int64_t k = group == 0 ? 275 : 2 * group, m = least_rows(bits, group) + 5;
      Weights w = random_weights(k, 50, group, bits, random);
      for (float& scale : w.scales) scale = std::ldexp(1.0f, power(random));
      w.pack_again();
      const Case c{m, w, kF32};
      const Buffer x = rows_of(c, 0, [&] { return static_cast<float>(small(random)); });
      for (Isa isa : tested_isas()) {
        const Buffer y = multiplied(c, x, isa, Parallel());
        for (int64_t r = 0; r < m; ++r) {
          for (int64_t j = 0; j < w.n; ++j) {
            double expected = 0;
            for (int64_t i = 0; i < k; ++i) {
              expected += element(x.get(), kBf16, r * k + i) * w.qvalue(i, j) *
                          static_cast<double>(w.scale(i, j));
            }
            CHECK_THAT(element(y.get(), kF32, r * w.n + j) == expected, c.text() + " on " + name(isa));
          }
        }
      }
    }
  }
}

// Scales and rows from one end of the range to the other, whose products stay inside.
TEST(floats_tiny_and_huge) {
  std::mt19937 random(35);
  for (int bits : {4, 8}) {
    for (int64_t group : {0, 32}) {
      for (int scale : {-100, 60, 110}) {
        Weights w = random_weights(64, 20, group, bits, random);
        const Case c{least_rows(bits, group), w, kF32};
        const Buffer x = normal_rows(c, random, 0);
        Buffer scaled(x.size(), 0);
        for (int64_t i = 0; i < c.m * w.k; ++i) {
          const float value = static_cast<float>(element(x.get(), kBf16, i));
          set_element(scaled.get(), kBf16, i, std::ldexp(value, -scale));
        }
        std::vector<Buffer> plain;
        for (Isa isa : tested_isas()) plain.push_back(multiplied(c, x, isa, Parallel()));
        for (float& s : w.scales) s = std::ldexp(s, scale);
        w.pack_again();
        size_t turn = 0;
        for (Isa isa : tested_isas()) {
          const Buffer y = multiplied(c, scaled, isa, Parallel());
          const Buffer& expected = plain[turn++];
          CHECK_THAT(std::memcmp(y.get(), expected.get(), static_cast<size_t>(y.size())) == 0,
                     c.text() + " on " + name(isa));
        }
      }
    }
  }
}

TEST(floats_special_rows) {
  std::mt19937 random(36);
  for (int bits : {4, 8}) {
    for (const auto& [group, digits] : {std::pair{0, 0}, std::pair{32, 0}, std::pair{32, 1}}) {
      const Weights w = random_weights(96, 33, group, bits, random);
      const Case c{std::max<int64_t>(64, least_rows(bits, group)) + 3, w, kF32, digits};
      Buffer x = normal_rows(c, random, 1);
      std::vector<Buffer> clean;
      for (Isa isa : tested_isas()) clean.push_back(multiplied(c, x, isa, Parallel()));
      set_element(x.get(), kBf16, 1 * 96 + 95, NAN);
      set_element(x.get(), kBf16, 2 * 96, INFINITY);
      set_element(x.get(), kBf16, 3 * 96 + 40, -INFINITY);
      for (int64_t i = 0; i < 96; ++i) set_element(x.get(), kBf16, 4 * 96 + i, 0.0f);
      size_t turn = 0;
      for (Isa isa : tested_isas()) {
        const Buffer y = multiplied(c, x, isa, Parallel());
        const Buffer& before = clean[turn++];
        for (int64_t r = 0; r < c.m; ++r) {
          for (int64_t j = 0; j < w.n; ++j) {
            const double got = element(y.get(), kF32, r * w.n + j);
            const bool fits = r == 1             ? std::isnan(got)
                              : r == 2 || r == 3 ? !std::isfinite(got)
                              : r == 4           ? got == 0.0
                                                 : got == element(before.get(), kF32, r * w.n + j);
            CHECK_THAT(fits, c.text() + " row " + std::to_string(r) + " on " + name(isa));
          }
        }
      }
    }
  }
}

TEST(floats_refuse_damaged_weights) {
  std::mt19937 random(37);
  for (int64_t place : {0, 8, 64, 700}) {
    for (Isa isa : tested_isas()) {
      Weights w = random_weights(64, 70, 32, 4, random);
      const Case c{40, w, kF32};
      const Buffer x = normal_rows(c, random, 0);
      w.buffer.get()[w.layout.panel_bytes() + place] ^= 3;
      bool refused = false;
      try {
        multiplied(c, x, isa, Parallel());
      } catch (const Error&) {
        refused = true;
      }
      CHECK_THAT(refused, std::to_string(place) + " on " + name(isa));
    }
  }
}

}  // namespace
