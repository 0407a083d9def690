// Matmuls that add a bias and a residual, against the plain ones and additions of their own.
#include <cmath>
#include <string>

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

  int64_t y_bytes() const { return m * n * static_cast<int64_t>(byte_size(y_dtype)); }

  std::string text() const {
    return "m=" + std::to_string(m) + " k=" + std::to_string(k) + " n=" + std::to_string(n) +
           " group=" + std::to_string(group) + " bits=" + std::to_string(bits) + " digits=" +
           std::to_string(digits) + " x=" + name(x_dtype) + " y=" + name(y_dtype);
  }
};

Buffer random_numbers(int64_t count, DType type, std::mt19937& random, int64_t offset) {
  const int64_t size = static_cast<int64_t>(byte_size(type));
  Buffer made(count * size, offset * size);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (int64_t i = 0; i < count; ++i) set_element(made.get(), type, i, normal(random));
  return made;
}

Matmul plain_matmul(const Case& c, const Buffer& x, const Weights& w, Buffer* y) {
  Matmul args;
  args.x = x.get();
  args.x_dtype = c.x_dtype;
  args.m = c.m;
  args.weights = w.packed();
  args.y = y->get();
  args.y_dtype = c.y_dtype;
  args.digits = c.digits;
  return args;
}

// y[i] + addends[i % count], in y's dtype.
void add(const Case& c, const Buffer& addends, int64_t count, Buffer* y) {
  for (int64_t i = 0; i < c.m * c.n; ++i) {
    const auto sum = static_cast<float>(element(y->get(), c.y_dtype, i)) +
                     static_cast<float>(element(addends.get(), c.y_dtype, i % count));
    set_element(y->get(), c.y_dtype, i, sum);
  }
}

void check_same(const Case& c, const Buffer& y, const Buffer& expected, const std::string& what) {
  bool same = true;
  for (int64_t i = 0; i < c.m * c.n && same; ++i) {
    const double got = element(y.get(), c.y_dtype, i);
    const double wanted = element(expected.get(), c.y_dtype, i);
    same = (std::isnan(got) && std::isnan(wanted)) ||
           (got == wanted && std::signbit(got) == std::signbit(wanted));
  }
  CHECK_THAT(same, c.text() + what);
}

// Cuts y, in place.
void clamp(const Case& c, Buffer* y) {
  for (int64_t i = 0; i < c.m * c.n; ++i) {
    const auto value = static_cast<float>(element(y->get(), c.y_dtype, i));
    if (value < -1.0f) set_element(y->get(), c.y_dtype, i, -1.0f);
    if (value > 2.0f) set_element(y->get(), c.y_dtype, i, 2.0f);
  }
}

// Choices of what is added, a residual in the place of y, and results that are cut.
void check_additions(const Case& c, const Buffer& x, const Buffer& bias, const Buffer& residual,
                     const Weights& w, const Parallel& parallel, int64_t offset) {
  for (Isa isa : tested_isas()) {
    Buffer product(c.y_bytes(), offset);
    matmul(plain_matmul(c, x, w, &product), parallel, isa);
    for (int added : {1, 2, 3, 4, 7}) {
      Buffer expected(c.y_bytes(), 0);
      std::memcpy(expected.get(), product.get(), static_cast<size_t>(c.y_bytes()));
      if ((added & 1) != 0) add(c, bias, c.n, &expected);
      if ((added & 2) != 0) add(c, residual, c.m * c.n, &expected);
      if ((added & 4) != 0) clamp(c, &expected);
      Buffer y(c.y_bytes(), offset);
      Matmul args = plain_matmul(c, x, w, &y);
      args.clamps = (added & 4) != 0;
      args.least = -1.0f;
      args.most = 2.0f;
      if ((added & 1) != 0) args.bias = bias.get();
      if ((added & 2) != 0) args.residual = residual.get();
      const std::string what = std::string(" on ") + name(isa) + ", added " + std::to_string(added);
      matmul(args, parallel, isa);
      check_same(c, y, expected, what);
      if ((added & 2) == 0 || args.clamps) continue;
      std::memcpy(y.get(), residual.get(), static_cast<size_t>(c.y_bytes()));
      args.residual = y.get();
      matmul(args, parallel, isa);
      check_same(c, y, expected, what + " in place");
    }
  }
}

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel, int64_t offset) {
  if (!takes_case()) return;
  const Weights w = random_weights(c.k, c.n, c.group, c.bits, random, offset);
  const Buffer x = random_numbers(c.m * c.k, c.x_dtype, random, offset);
  const Buffer bias = random_numbers(c.n, c.y_dtype, random, offset);
  const Buffer residual = random_numbers(c.m * c.n, c.y_dtype, random, offset);
  check_additions(c, x, bias, residual, w, parallel, offset);
}

// Results of all dtypes, whatever computes them; widths take turns, and dtypes of operands.
TEST(additions_round_as_their_own) {
  std::mt19937 random(31);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (int64_t m : {1, 3, 17, 40, 130, 300}) {
    for (int64_t group : {0, 32}) {
      for (int bits : {4, 8}) {
        for (int digits : {0, 1, 3}) {
          for (DType y_dtype : kFloats) {
            const DType x_dtype = y_dtype == DType::BF16 ? DType::BF16 : kFloats[turn / 3 % 3];
            const int64_t n = ++turn % 2 == 0 ? 70 : 33;
            // Two turns per offset: both widths have it.
            check_case({m, 96, n, group, bits, digits, x_dtype, y_dtype}, random, parallel,
                       turn / 2 % 4);
          }
        }
      }
    }
  }
}

// Sums over several blocks of K, and over none. Bits take turns: each depth has both in all dtypes.
TEST(additions_whatever_k_is) {
  std::mt19937 random(32);
  Threads pool(2);
  const Parallel parallel(pool);
  int turn = 0;
  for (int64_t k : {0, 8, 384, 1024, 1032, 2500, 4500}) {
    for (int64_t m : {2, 40, 129}) {
      for (DType y_dtype : kFloats) {
        if (++turn % 2 == 0) {
          check_case({m, k, 49, 0, 8, 1, DType::F32, y_dtype}, random, parallel, 1);
        } else {
          check_case({m, k, 49, 0, 4, 1, DType::BF16, y_dtype}, random, parallel, 3);
        }
      }
    }
  }
}

TEST(additions_of_what_is_not_finite) {
  std::mt19937 random(33);
  for (DType y_dtype : kFloats) {
    for (int64_t m : {3, 40}) {
      const Case c{m, 64, 35, 0, 8, 1, DType::F32, y_dtype};
      const Weights w = random_weights(c.k, c.n, c.group, c.bits, random);
      Buffer x = random_numbers(c.m * c.k, c.x_dtype, random, 0);
      for (int64_t i = 0; i < c.k; ++i) set_element(x.get(), c.x_dtype, c.k + i, INFINITY);
      Buffer bias = random_numbers(c.n, y_dtype, random, 1);
      Buffer residual = random_numbers(c.m * c.n, y_dtype, random, 1);
      const float numbers[] = {NAN, INFINITY, -INFINITY, 6e4f, -0.0f, 0.0f};
      for (int64_t i = 0; i < c.m * c.n; i += 2) {
        set_element(residual.get(), y_dtype, i, numbers[i / 2 % 6]);
      }
      for (int64_t i = 0; i < c.n; i += 3) set_element(bias.get(), y_dtype, i, numbers[i / 3 % 6]);
      check_additions(c, x, bias, residual, w, Parallel(), 0);
    }
  }
}

}  // namespace
