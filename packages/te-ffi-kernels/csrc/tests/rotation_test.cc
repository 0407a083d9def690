// Matmuls of rows that are rotated on the way.
#include <cmath>
#include <string>

#include "common/error.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

// A block times Hadamard's matrix by its definition: H(2n) = [H(n) H(n); H(n) -H(n)].
std::vector<float> transformed(const std::vector<float>& x) {
  if (x.size() == 1) return x;
  const auto middle = x.begin() + static_cast<int64_t>(x.size() / 2);
  std::vector<float> first = transformed({x.begin(), middle});
  std::vector<float> second = transformed({middle, x.end()});
  std::vector<float> out;
  for (size_t i = 0; i < first.size(); ++i) out.push_back(first[i] + second[i]);
  for (size_t i = 0; i < first.size(); ++i) out.push_back(first[i] - second[i]);
  return out;
}

struct Rows {
  Buffer given, rotated;  // of `dtype`, and in float32
  std::vector<int8_t> signs;
};

Rows random_rows(int64_t m, int64_t k, int64_t block, DType dtype, std::mt19937& random) {
  const auto size = static_cast<int64_t>(byte_size(dtype));
  Rows rows{Buffer(m * k * size, size), Buffer(m * k * 4, 0), {}};
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < k; ++i) rows.signs.push_back(random() % 2 == 0 ? 1 : -1);
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  for (int64_t begin = 0; begin < m * k; begin += block) {
    std::vector<float> numbers;
    for (int64_t i = begin; i < begin + block; ++i) {
      set_element(rows.given.get(), dtype, i, normal(random));
      numbers.push_back(static_cast<float>(element(rows.given.get(), dtype, i)) *
                        static_cast<float>(rows.signs[static_cast<size_t>(i % k)]));
    }
    numbers = transformed(numbers);
    for (int64_t i = 0; i < block; ++i) {
      set_element(rows.rotated.get(), DType::F32, begin + i, numbers[static_cast<size_t>(i)] * factor);
    }
  }
  return rows;
}

Buffer multiplied(const Buffer& x, DType dtype, int64_t m, const Weights& w, int64_t n, int digits,
                  Rotation rotation, Isa isa) {
  Buffer y(m * n * 4, 0);
  Matmul args;
  args.x = x.get();
  args.x_dtype = dtype;
  args.m = m;
  args.weights = w.packed();
  args.y = y.get();
  args.digits = digits;
  args.rotation = rotation;
  matmul(args, Parallel(), isa);
  return y;
}

// Every number of digits, with weights whose scales are of columns and of groups.
TEST(rotated_rows_are_those_of_the_definition) {
  std::mt19937 random(31);
  constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};
  int turn = 0;
  for (const auto& [k, block] :
       {std::pair{2, 2}, std::pair{6, 2}, std::pair{20, 4}, std::pair{40, 8}, std::pair{48, 16},
        std::pair{96, 32}, std::pair{384, 32}, std::pair{192, 64}, std::pair{1024, 1024}}) {
    for (int64_t m : {1, 7}) {
      for (int bits : {4, 8}) {
        ++turn;
        const int64_t group = k % 32 == 0 && turn % 2 == 0 ? 32 : 0, n = 19;
        const DType dtype = kFloats[turn % 3];
        const Rows rows = random_rows(m, k, block, dtype, random);
        const Weights w = random_weights(n, panel_layout(k, group, bits), random);
        for (int digits : {0, 1, 2, 3}) {
          const Rotation rotation{rows.signs.data(), block};
          const Buffer expected =
              multiplied(rows.rotated, DType::F32, m, w, n, digits, {}, Isa::kGeneric);
          for (Isa isa : tested_isas()) {
            const Buffer y = multiplied(rows.given, dtype, m, w, n, digits, rotation, isa);
            CHECK_THAT(std::memcmp(y.get(), expected.get(), static_cast<size_t>(y.size())) == 0,
                       "k=" + std::to_string(k) + " block=" + std::to_string(block) + " digits=" +
                           std::to_string(digits) + " bits=" + std::to_string(bits) + " on " +
                           name(isa));
          }
        }
      }
    }
  }
}

TEST(a_rotation_must_have_a_block_that_fits) {
  std::mt19937 random(32);
  const Weights w = random_weights(3, panel_layout(24, 0, 8), random);
  const Rows rows = random_rows(1, 24, 8, DType::F32, random);
  for (int64_t block : {-2, 1, 3, 6, 16, 24}) {
    bool refused = false;
    try {
      multiplied(rows.given, DType::F32, 1, w, 3, 1, {rows.signs.data(), block}, Isa::kGeneric);
    } catch (const Error& error) {
      refused = std::string(error.what()).find("a power of two from 2") != std::string::npos;
    }
    CHECK(refused);
  }
}

}  // namespace
