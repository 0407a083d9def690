// Products of int8 in all layouts, on matrices of exactly their size at odd addresses, at edge sizes,
// against integers.
#include "training/dot_int8.h"

#include <cstring>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

struct Case {
  int64_t groups, k, m, n;
  bool lhs_last = false, rhs_last = false;
};

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel, Isa isa) {
  if (!takes_case()) return;
  const auto count = [](int64_t size) { return static_cast<size_t>(size); };
  Buffer lhs(c.groups * c.k * c.m, 1), rhs(c.groups * c.k * c.n, 3);
  for (Buffer* side : {&lhs, &rhs}) {
    for (int64_t i = 0; i < side->size(); ++i) side->get()[i] = static_cast<uint8_t>(random());
  }
  std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
  std::vector<float> lhs_scales(count(c.groups * c.m)), rhs_scales(count(c.groups * c.n));
  for (auto* scales : {&lhs_scales, &rhs_scales}) {
    for (float& scale : *scales) scale = uniform(random);
  }
  std::vector<float> out(count(c.groups * c.m * c.n), -1.0f);
  training::Dot args;
  args.groups = c.groups;
  args.k = c.k;
  args.m = c.m;
  args.n = c.n;
  args.lhs_last = c.lhs_last;
  args.rhs_last = c.rhs_last;
  args.lhs = reinterpret_cast<const int8_t*>(lhs.get());
  args.rhs = reinterpret_cast<const int8_t*>(rhs.get());
  args.lhs_scales = lhs_scales.data();
  args.rhs_scales = rhs_scales.data();
  args.out = out.data();
  training::dot_int8(args, parallel, isa);
  bool good = true;
  for (int64_t g = 0; g < c.groups; ++g) {
    for (int64_t i = 0; i < c.m; ++i) {
      for (int64_t j = 0; j < c.n; ++j) {
        int32_t sum = 0;
        for (int64_t k = 0; k < c.k; ++k) {
          const int64_t left = c.lhs_last ? (g * c.m + i) * c.k + k : (g * c.k + k) * c.m + i;
          const int64_t right = c.rhs_last ? (g * c.n + j) * c.k + k : (g * c.k + k) * c.n + j;
          sum += args.lhs[left] * args.rhs[right];
        }
        const float one = static_cast<float>(sum) * lhs_scales[count(g * c.m + i)];
        const float want = one * rhs_scales[count(g * c.n + j)];
        good = good && out[count((g * c.m + i) * c.n + j)] == want;
      }
    }
  }
  CHECK_THAT(good, std::string(name(isa)) + ", " + std::to_string(c.groups) + " groups, k " +
                       std::to_string(c.k) + ", m " + std::to_string(c.m) + ", n " +
                       std::to_string(c.n) + (c.lhs_last ? ", lhs last" : "") +
                       (c.rhs_last ? ", rhs last" : ""));
}

TEST(int8_products_summed_over_rows) {
  std::mt19937 random(31);
  Threads pool(2);
  const Parallel two(pool), one;
  for (Isa isa : tested_isas()) {
    for (int64_t k : {0, 1, 3, 4, 63, 64, 65, 200}) {
      for (int64_t m : {1, 15, 33, 130}) {
        for (int64_t n : {1, 16, 31, 70}) check_case({1, k, m, n}, random, one, isa);
      }
    }
    // Several tasks, of rows, of panels and of groups; sums in several parts.
    check_case({1, 70, 300, 200}, random, two, isa);
    check_case({2, 100, 40, 900}, random, two, isa);
    check_case({5, 64, 70, 50}, random, two, isa);
    check_case({1, 3000, 40, 70}, random, two, isa);
    check_case({1, 5, 0, 7}, random, one, isa);
  }
}

TEST(int8_products_of_all_layouts) {
  std::mt19937 random(32);
  Threads pool(2);
  const Parallel two(pool), one;
  for (Isa isa : tested_isas()) {
    for (int layout = 1; layout < 4; ++layout) {
      const bool lhs_last = layout & 1, rhs_last = layout & 2;
      for (int64_t k : {0, 1, 15, 65, 200}) {
        for (int64_t m : {1, 33}) {
          for (int64_t n : {1, 31, 130}) {
            check_case({1, k, m, n, lhs_last, rhs_last}, random, one, isa);
          }
        }
      }
      // Panels that tasks pack for themselves, and many rows, for which they are packed first.
      check_case({1, 600, 64, 700, lhs_last, rhs_last}, random, two, isa);
      check_case({1, 130, 300, 200, lhs_last, rhs_last}, random, two, isa);
      check_case({5, 64, 70, 50, lhs_last, rhs_last}, random, two, isa);
    }
  }
}

// Results that go past the caches: whole lines, and the ends of rows.
TEST(int8_products_with_large_results) {
  std::mt19937 random(33);
  Threads pool(2);
  for (Isa isa : tested_isas()) {
    check_case({1, 5, 1100, 1024}, random, Parallel(pool), isa);
    check_case({1, 5, 1100, 1001}, random, Parallel(pool), isa);
  }
}

TEST(int8_products_reach_the_ends_of_int32) {
  constexpr int64_t kLength = (int64_t{1} << 17) - 64;
  const std::vector<int8_t> least(kLength * 16, -128);
  const float scales[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  for (Isa isa : tested_isas()) {
    std::vector<float> out(256);
    training::Dot args;
    args.k = kLength;
    args.m = args.n = 16;
    args.lhs = args.rhs = least.data();
    args.lhs_scales = args.rhs_scales = scales;
    args.out = out.data();
    training::dot_int8(args, Parallel(), isa);
    bool good = true;
    for (float one : out) good = good && one == 128.0f * 128.0f * static_cast<float>(kLength);
    CHECK_THAT(good, name(isa));
    args.k += 1;
    CHECK(throws<Error>([&] { training::dot_int8(args, Parallel(), isa); },
                        "at most 131008 products, got 131009"));
  }
}

}  // namespace
