// Matmuls against double arithmetic, and all instruction sets against each other bit for bit.
#include <algorithm>
#include <cmath>
#include <string>

#include "common/error.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

struct Case {
  int64_t m, k, n, group;
  int bits, digits;
  DType x_dtype, y_dtype;
  int scale_bits = 32;  // of the packed weight
  float x_scale = 0;    // of all rows; 0: one of each
  TableKind table = {0, ScaleKind::kF32};

  PanelLayout layout() const {
    if (table.table_id == 0) return panel_layout(k, group, bits, scale_bits);
    return panel_layout(k, group, bits, table.scale_kind, table.table_id);
  }

  std::string text() const {
    return "m=" + std::to_string(m) + " k=" + std::to_string(k) + " n=" + std::to_string(n) +
           " group=" + std::to_string(group) + " bits=" + std::to_string(bits) +
           " digits=" + std::to_string(digits) +
           " table=" + layout().table().name +
           " scale_bits=" + std::to_string(layout().scale_bits()) + " x=" + name(x_dtype) + " y=" + name(y_dtype);
  }
};

Buffer random_rows(const Case& c, std::mt19937& random, int64_t offset) {
  const int64_t size = static_cast<int64_t>(byte_size(c.x_dtype));
  Buffer x(c.m * c.k * size, offset * size);
  std::normal_distribution<float> normal;
  for (int64_t r = 0; r < c.m; ++r) {
    const float magnitude = std::ldexp(1.0f, static_cast<int>(r % 7) - 3);
    for (int64_t i = 0; i < c.k; ++i) {
      set_element(x.get(), c.x_dtype, r * c.k + i, normal(random) * magnitude);
    }
  }
  return x;
}

Buffer multiplied(const Case& c, const Buffer& x, const Weights& w, Isa isa,
                  const Parallel& parallel, int64_t offset) {
  const int64_t size = static_cast<int64_t>(byte_size(c.y_dtype));
  Buffer y(c.m * c.n * size, offset * size);
  Matmul args;
  args.x = x.get();
  args.x_dtype = c.x_dtype;
  args.m = c.m;
  args.weights = w.packed();
  args.y = y.get();
  args.y_dtype = c.y_dtype;
  args.digits = c.digits;
  if (c.x_scale != 0) args.x_scale = &c.x_scale;
  matmul(args, parallel, isa);
  return y;
}

// Of a row of x: the quantized values, and the scale of each group, that dynamic int8 has by
// definition.
struct QuantizedRow {
  std::vector<int> qvalues;
  std::vector<float> scales;
};

QuantizedRow quantized(const Case& c, const Buffer& x, int64_t row) {
  QuantizedRow q;
  const int64_t group = c.group == 0 ? c.k : c.group;
  for (int64_t begin = 0; begin < c.k; begin += group) {
    const auto at = [&](int64_t i) {
      return static_cast<float>(element(x.get(), c.x_dtype, row * c.k + begin + i));
    };
    float largest = 0;
    for (int64_t i = 0; i < group; ++i) largest = std::max(largest, std::fabs(at(i)));
    const float own = std::max(largest * (1.0f / 127.0f), 0x1p-126f);
    const float scale = c.x_scale != 0 ? c.x_scale : own;
    q.scales.push_back(scale);
    for (int64_t i = 0; i < group; ++i) {
      const float ratio = std::isnan(at(i)) ? 0.0f : std::clamp(at(i) / scale, -127.0f, 127.0f);
      q.qvalues.push_back(static_cast<int>(std::nearbyint(ratio)));
    }
  }
  return q;
}

// What int8 must equal bit for bit: exact sums of each group, and of each part of a table's numbers,
// rescaled and added up in float32.
float int8_matmul(const Case& c, const QuantizedRow& q, const Weights& w, int64_t column) {
  const int64_t group = c.group == 0 ? c.k : c.group;
  float total = 0;
  for (size_t g = 0; g < q.scales.size(); ++g) {
    const int64_t begin = static_cast<int64_t>(g) * group;
    const bool is_wide = w.layout.bits == 4 && w.layout.table().parts == 2;
    int64_t sums[2] = {};  // high and low
    for (int64_t i = begin; i < begin + group; ++i) {
      const int number = w.number(i, column);
      const int high = is_wide ? static_cast<int>(std::floor((number + 128) / 256.0)) : 0;
      sums[0] += q.qvalues[static_cast<size_t>(i)] * high;
      sums[1] += q.qvalues[static_cast<size_t>(i)] * (number - 256 * high);
    }
    const float scale = w.scale(begin, column);
    if (is_wide) total += static_cast<float>(sums[0]) * q.scales[g] * (256 * scale);
    total += static_cast<float>(sums[1]) * q.scales[g] * scale;
  }
  return total;
}

float rounded(float value, DType type) {
  uint8_t bytes[4];
  set_element(bytes, type, 0, value);
  return static_cast<float>(element(bytes, type, 0));
}

double relative_step(DType type) {
  return type == DType::F32 ? 0x1p-24 : type == DType::BF16 ? 0x1p-8 : 0x1p-11;
}

void check_values(const Case& c, const Buffer& x, const Weights& w, const Buffer& y) {
  for (int64_t r = 0; r < c.m; ++r) {
    const QuantizedRow q = quantized(c, x, r);
    // What a number is rounded by at most: two digits have 15 bits of the largest of its segment,
    // three have 23 of the largest of its row.
    const int64_t segment = c.digits == 3 ? c.k : c.group != 0 ? c.group : 256;
    std::vector<double> rounding;
    for (int64_t begin = 0; begin < c.k && c.digits != 1; begin += segment) {
      double largest = 0;
      for (int64_t i = begin; i < std::min(c.k, begin + segment); ++i) {
        largest = std::max(largest, std::fabs(element(x.get(), c.x_dtype, r * c.k + i)));
      }
      rounding.push_back(largest * (c.digits == 2 ? 0x1p-15 : 0x1p-23));
    }
    for (int64_t j = 0; j < c.n; ++j) {
      const double got = element(y.get(), c.y_dtype, r * c.n + j);
      if (c.digits == 1) {
        const float expected = rounded(int8_matmul(c, q, w, j), c.y_dtype);
        CHECK_THAT(got == static_cast<double>(expected), c.text());
        continue;
      }
      double expected = 0, bound = 0, rounded_off = 0;
      for (int64_t i = 0; i < c.k; ++i) {
        const double v = static_cast<double>(w.number(i, j)) * static_cast<double>(w.scale(i, j));
        const double u = element(x.get(), c.x_dtype, r * c.k + i);
        expected += u * v;
        bound += std::fabs(u * v);
        rounded_off += rounding[static_cast<size_t>(i / segment)] * std::fabs(v);
      }
      // Rounding of x, of sums in float32, and of y.
      const double tolerance = rounded_off + 0x1p-21 * bound +
                               relative_step(c.y_dtype) * std::fabs(expected) * 1.01 + 1e-7;
      CHECK_THAT(std::fabs(got - expected) <= tolerance,
                 c.text() + " got " + std::to_string(got) + " expected " +
                     std::to_string(expected) + " within " + std::to_string(tolerance));
    }
  }
}

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel, int64_t offset) {
  if (!takes_case()) return;
  const Weights w = random_weights(c.n, c.layout(), random, offset);
  const Buffer x = random_rows(c, random, offset);
  const Buffer first = multiplied(c, x, w, Isa::kGeneric, Parallel(), offset);
  check_values(c, x, w, first);
  for (Isa isa : tested_isas()) {
    const Buffer y = multiplied(c, x, w, isa, parallel, offset);
    CHECK_THAT(std::memcmp(y.get(), first.get(), static_cast<size_t>(y.size())) == 0,
               c.text() + " differs on " + name(isa));
  }
}

TEST(matmul_edge_sizes) {
  std::mt19937 random(11);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (int64_t m : {0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 33}) {
    for (int64_t k : {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130}) {
      for (int64_t n : {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130}) {
        ++turn;
        Case c{m,
                     k,
                     n,
                     0,
                     turn % 2 == 0 ? 8 : 4,
                     1 + turn % 3,
                     kFloats[turn / 3 % 3],
                     kFloats[turn / 9 % 3]};
        check_case(c, random, parallel, turn % 4);
        if (c.bits == 8) continue;
        c.scale_bits = turn % 4 == 1 ? 16 : 32;
        check_case(c, random, parallel, turn % 4);
      }
    }
  }
}

TEST(matmul_groups) {
  std::mt19937 random(12);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (int64_t group : {8, 16, 24, 32, 64, 72, 88, 96, 128}) {
    for (int64_t count : {1, 2, 3}) {
      for (int64_t m : {1, 2, 3, 4, 7, 12, 17, 40}) {
        for (int64_t n : {1, 16, 17, 40, 65}) {
          for (int bits : {4, 8}) {
            ++turn;
            const DType x_dtype = kFloats[turn % 3], y_dtype = kFloats[turn / 3 % 3];
            Case c{m, group * count, n, group, bits, 1 + turn % 3, x_dtype, y_dtype};
            check_case(c, random, parallel, turn % 4);
            if (bits == 8) continue;
            c.scale_bits = turn % 4 < 2 ? 16 : 32;
            check_case(c, random, parallel, turn % 4);
          }
        }
      }
    }
  }
}

TEST(matmul_tables) {
  std::mt19937 random(20);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (const TableKind& table : kTableKinds) {
    for (int64_t group : {0, 8, 16, 24, 32, 64, 128}) {
      if (group == 0 && kTables[table.table_id].parts == 2) continue;
      for (int64_t m : {1, 2, 3, 4, 7, 17, 40}) {
        for (int64_t n : {1, 17, 40, 65}) {
          ++turn;
          const int64_t k = group == 0 ? 1 + turn % 130 : group * (1 + turn % 3);
          Case c{m, k, n, group, 4, 1 + turn % 3, kFloats[turn / 3 % 3], kFloats[turn / 9 % 3]};
          c.table = table;
          check_case(c, random, parallel, turn % 4);
        }
      }
    }
    Case c{45, 1280, 70, 64, 4, 1, DType::F32, DType::F32};
    c.table = table;
    for (c.digits = 1; c.digits < 4; ++c.digits) check_case(c, random, parallel, 1);
  }
}

// Every place of each table, at the ends of x: no sum saturates on the way.
TEST(matmul_tables_at_their_ends) {
  std::mt19937 random(21);
  for (const TableKind& table : kTableKinds) {
    for (int64_t m : {1, 40}) {
      for (int place = 0; place < 16; ++place) {
        Case c{m, 256, 33, 64, 4, 1 + place % 3, DType::F32, DType::F32};
        c.table = table;
        const Weights w = random_weights(c.n, c.layout(), random, 0, place);
        Buffer x(c.m * c.k * 4, 0);
        for (int64_t i = 0; i < c.m * c.k; ++i) {
          set_element(x.get(), DType::F32, i, i % 300 < 150 ? -1.0f : 0.999f);
        }
        const Buffer first = multiplied(c, x, w, Isa::kGeneric, Parallel(), 0);
        check_values(c, x, w, first);
        for (Isa isa : tested_isas()) {
          const Buffer y = multiplied(c, x, w, isa, Parallel(), 0);
          CHECK_THAT(std::memcmp(y.get(), first.get(), static_cast<size_t>(y.size())) == 0,
                     c.text() + " differs on " + name(isa));
        }
      }
    }
  }
}

TEST(matmul_large) {
  std::mt19937 random(13);
  Threads pool(3);
  const Parallel parallel(pool);
  for (const auto& [bits, scale_bits] : {std::pair{4, 32}, std::pair{4, 16}, std::pair{8, 32}}) {
    const auto check = [&](Case c, int64_t offset) {
      c.scale_bits = scale_bits;
      check_case(c, random, parallel, offset);
    };
    // Several tasks of rows and panels, several blocks of K, and more than one slab of rows.
    check({450, 96, 70, 0, bits, 1, DType::F32, DType::F32}, 1);
    check({450, 96, 70, 32, bits, 3, DType::F32, DType::BF16}, 1);
    check({7, 4500, 40, 0, bits, 1, DType::BF16, DType::F32}, 2);
    check({40, 4500, 20, 0, bits, 2, DType::BF16, DType::BF16}, 3);
    check({2, 4480, 300, 64, bits, 3, DType::F32, DType::F32}, 3);
    check({201, 40000, 3, 0, bits, 2, DType::F16, DType::F32}, 0);
  }
}

// Groups whose two digits are put together in int32, and those for which that is too small.
TEST(matmul_long_groups) {
  std::mt19937 random(20);
  Threads pool(2);
  const Parallel parallel(pool);
  for (int64_t group : {512, 520, 1024, 4096, 8192, 8200}) {
    for (int bits : {4, 8}) {
      for (int64_t m : {1, 5, 7, 20}) {
        const Case c{m, 2 * group, 21, group, bits, 2, DType::F32, DType::F32};
        check_case(c, random, parallel, m % 4);
      }
    }
  }
}

// An outlier costs the numbers of its own group their bits, and those of no other group.
TEST(matmul_outliers_stay_in_their_group) {
  std::mt19937 random(21);
  for (int64_t group : {0, 32}) {
    Case c{8, 1024, 16, group, 8, 0, DType::F32, DType::F32};
    Weights w = random_weights(c.n, c.layout(), random);
    const int64_t segment = group == 0 ? 256 : group;
    for (int64_t i = 0; i < c.n; ++i) w.qvalues[static_cast<size_t>(i)] = 0;  // of the outlier
    w.pack_again();
    Buffer x = random_rows(c, random, 0);
    Buffer outlier(x.size(), 0);
    std::memcpy(outlier.get(), x.get(), static_cast<size_t>(x.size()));
    for (int64_t r = 0; r < c.m; ++r) {
      for (Buffer* one : {&x, &outlier}) {
        for (int64_t i = 0; i < segment; ++i) set_element(one->get(), c.x_dtype, r * c.k + i, 0.0f);
      }
      set_element(outlier.get(), c.x_dtype, r * c.k, 1e20f);
    }
    for (Isa isa : tested_isas()) {
      const Buffer y = multiplied(c, x, w, isa, Parallel(), 0);
      const Buffer z = multiplied(c, outlier, w, isa, Parallel(), 0);
      CHECK(std::memcmp(y.get(), z.get(), static_cast<size_t>(y.size())) == 0);
    }
  }
}

// Sums at the very ends: the largest quantized values of both sides, over more rows of K than int32
// holds.
TEST(matmul_never_overflows) {
  std::mt19937 random(14);
  for (int64_t k : {65536, 131008, 131072, 140000}) {
    for (int sign : {-1, 1}) {
      for (const auto& [bits, digits] :
           {std::pair{8, 1}, std::pair{8, 2}, std::pair{8, 3}, std::pair{4, 1}, std::pair{4, 2},
            std::pair{4, 3}}) {
        Case c{1, k, 1, 0, bits, digits, DType::F32, DType::F32};
        const int most = bits == 4 ? 8 : 128;
        const Weights w =
            random_weights(1, c.layout(), random, 0, sign < 0 ? -most : most - 1);
        Buffer x(4 * k, 0);
        for (int64_t i = 0; i < k; ++i) set_element(x.get(), DType::F32, i, 127.0f);
        double expected = 0;
        const double scale = static_cast<double>(w.scale(0, 0));
        for (int64_t i = 0; i < k; ++i) expected += 127.0 * w.qvalue(i, 0) * scale;
        for (Isa isa : tested_isas()) {
          const Buffer y = multiplied(c, x, w, isa, Parallel(), 0);
          const double got = element(y.get(), DType::F32, 0);
          // Two digits are added up in float32, segment by segment.
          const double off = digits == 2 ? 0x1p-24 * static_cast<double>(k / 256) : 0;
          CHECK_THAT(std::fabs(got - expected) <= (1e-6 + off) * std::fabs(expected), c.text());
        }
      }
    }
  }
}

// Ratios at and beside the middle between two quantized values, where a product with the reciprocal
// is not enough.
TEST(matmul_values_at_ties) {
  std::mt19937 random(19);
  for (float largest : {127.0f, 1.0f, 3.1f, 0x1p-120f, 77.7f}) {
    const Case c{1, 600, 5, 0, 8, 1, DType::F32, DType::F32};
    const Weights w = random_weights(c.k, c.n, 0, 8, random);
    Buffer x(c.k * 4, 0);
    const float scale = std::max(largest * (1.0f / 127.0f), 0x1p-126f);
    for (int64_t i = 0; i < c.k; ++i) {
      float value = (static_cast<float>(i % 127) - 0.5f) * scale;
      for (int64_t step = 0; step < i % 5; ++step) value = std::nextafterf(value, INFINITY);
      set_element(x.get(), DType::F32, i, i == 300 ? largest : i % 2 == 0 ? value : -value);
    }
    for (Isa isa : tested_isas()) {
      check_values(c, x, w, multiplied(c, x, w, isa, Parallel(), 0));
    }
  }
}

TEST(matmul_integers_are_exact) {
  // Small integers in x and scales that are powers of two: digits lose nothing.
  std::mt19937 random(15);
  std::uniform_int_distribution<int> small(-100, 100);
  Weights w = random_weights(96, 19, 0, 8, random);
  for (float& s : w.scales) s = 0.25f;
  w.pack_again();
  for (int digits : {2, 3}) {
    const Case c{3, 96, 19, 0, 8, digits, DType::F32, DType::F32};
    Buffer x(3 * 96 * 4, 0);
    for (int64_t i = 0; i < 3 * 96; ++i) {
      set_element(x.get(), DType::F32, i, static_cast<float>(small(random)));
    }
    for (Isa isa : tested_isas()) {
      const Buffer y = multiplied(c, x, w, isa, Parallel(), 0);
      for (int64_t r = 0; r < 3; ++r) {
        for (int64_t j = 0; j < 19; ++j) {
          double expected = 0;
          for (int64_t i = 0; i < 96; ++i) {
            expected += element(x.get(), DType::F32, r * 96 + i) * w.qvalue(i, j) * 0.25;
          }
          CHECK(element(y.get(), DType::F32, r * 19 + j) == expected);
        }
      }
    }
  }
}

TEST(matmul_special_rows) {
  std::mt19937 random(16);
  for (int64_t group : {0, 32}) {
    const Weights w = random_weights(64, 33, group, 8, random);
    for (DType x_dtype : kFloats) {
      for (int digits : {1, 2, 3}) {
        const Case c{5, 64, 33, group, 8, digits, x_dtype, DType::F32};
        Buffer x = random_rows(c, random, 1);
        const auto set = [&](int64_t row, int64_t i, float value) {
          set_element(x.get(), x_dtype, row * 64 + i, value);
        };
        set(0, 63, NAN);
        set(1, 0, INFINITY);
        set(1, 5, -INFINITY);
        for (int64_t i = 0; i < 64; ++i) set(2, i, 0.0f);
        for (int64_t i = 0; i < 64; ++i) set(3, i, 0x1p-24f * static_cast<float>(i));
        for (Isa isa : tested_isas()) {
          const Buffer y = multiplied(c, x, w, isa, Parallel(), 0);
          for (int64_t j = 0; j < 33; ++j) {
            const auto at = [&](int64_t row) { return element(y.get(), DType::F32, row * 33 + j); };
            CHECK(std::isnan(at(0)));
            CHECK(digits == 1 ? !std::isfinite(at(1)) : std::isnan(at(1)));
            CHECK(at(2) == 0.0);
            CHECK(std::isfinite(at(3)) && std::isfinite(at(4)));
          }
        }
      }
    }
  }
}

// With one scale for all rows: what is beyond it saturates, whatever it is.
TEST(matmul_given_scales) {
  std::mt19937 random(19);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (const auto& [k, group] : {std::pair{1, 0}, std::pair{63, 0}, std::pair{130, 0},
                                 std::pair{600, 0}, std::pair{96, 32}, std::pair{144, 72}}) {
    for (int64_t m : {1, 3, 17, 70}) {
      for (float x_scale : {0.004f, 0.02f, 1.0f, 0x1p-127f}) {
        ++turn;
        Case c{m, k, 33, group, turn % 2 == 0 ? 8 : 4, 1, kFloats[turn % 3], kFloats[turn / 3 % 3]};
        c.x_scale = x_scale;
        if (x_scale > 0x1p-126f) check_case(c, random, parallel, turn % 4);
        const Weights w = random_weights(c.n, c.layout(), random, 0);
        Buffer x = random_rows(c, random, 0);
        for (float value : {NAN, INFINITY, -INFINITY}) {
          set_element(x.get(), c.x_dtype, static_cast<int64_t>(random() % (m * k)), value);
        }
        if (x_scale < 0x1p-126f) c.x_scale = 0x1p-126f;  // the least one
        const Buffer expected = multiplied(c, x, w, Isa::kGeneric, Parallel(), 0);
        check_values(c, x, w, expected);
        c.x_scale = x_scale;
        for (Isa isa : tested_isas()) {
          const Buffer y = multiplied(c, x, w, isa, parallel, 0);
          CHECK_THAT(std::memcmp(y.get(), expected.get(), static_cast<size_t>(y.size())) == 0,
                     c.text() + " differs on " + name(isa));
        }
      }
    }
  }
  for (int digits : {0, 2, 3}) {
    Case c{1, 64, 33, 0, 8, digits, DType::F32, DType::F32};
    c.x_scale = 1.0f;
    bool refused = false;
    try {
      multiplied(c, random_rows(c, random, 0), random_weights(c.n, c.layout(), random), Isa::kGeneric,
                 Parallel(), 0);
    } catch (const Error& error) {
      refused = std::string(error.what()).find("digits must be 1") != std::string::npos;
    }
    CHECK(refused);
  }
}

TEST(matmul_tiny_and_huge_rows) {
  std::mt19937 random(17);
  const Weights w = random_weights(64, 16, 0, 8, random);
  for (float magnitude : {0x1p-100f, 0x1p-60f, 0x1p100f}) {
    for (int digits : {1, 2, 3}) {
      const Case c{2, 64, 16, 0, 8, digits, DType::F32, DType::F32};
      Buffer x = random_rows(c, random, 0);
      Buffer scaled(x.size(), 0);
      for (int64_t i = 0; i < 128; ++i) {
        const float value = static_cast<float>(element(x.get(), DType::F32, i));
        set_element(scaled.get(), DType::F32, i, value * magnitude);
      }
      for (Isa isa : tested_isas()) {
        const Buffer y = multiplied(c, x, w, isa, Parallel(), 0);
        const Buffer z = multiplied(c, scaled, w, isa, Parallel(), 0);
        for (int64_t i = 0; i < 32; ++i) {
          const double expected = element(y.get(), DType::F32, i) * static_cast<double>(magnitude);
          const double got = element(z.get(), DType::F32, i);
          CHECK(std::fabs(got - expected) <= 1e-6 * std::fabs(expected));
        }
      }
    }
  }
}

// Threads that call at once have scratch of their own.
TEST(matmul_from_many_threads) {
  std::mt19937 random(18);
  Threads pool(3);
  const Parallel parallel(pool);
  const Case c{9, 200, 50, 0, 4, 3, DType::F32, DType::F32};
  const Weights w = random_weights(c.k, c.n, 0, 4, random);
  const Buffer x = random_rows(c, random, 0);
  const Buffer expected = multiplied(c, x, w, Isa::kGeneric, Parallel(), 0);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn) {
        const Buffer y = multiplied(c, x, w, selected_isa(), parallel, 0);
        const size_t bytes = static_cast<size_t>(y.size());
        if (std::memcmp(y.get(), expected.get(), bytes) != 0) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

}  // namespace
