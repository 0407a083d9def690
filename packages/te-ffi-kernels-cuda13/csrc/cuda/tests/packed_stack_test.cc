// Matmuls with weights of a stack, which kernels find by indices that are in memory of the device:
// one weight, or one for each group of rows.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cuda/tests/packed_run.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of the threads in software

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

// Weights of one shape, one after the other.
struct Stack {
  Stack(int64_t count, const PackedCase& c, std::mt19937& random)
      : one(panel_count(c.n, layout_of(c).columns()) * layout_of(c).panel_bytes()),
        buffer(count * one, 0) {
    for (int64_t i = 0; i < count; ++i) {
      weights.push_back(random_weights(c.n, layout_of(c), random));
      if (one == 0) continue;
      std::memcpy(buffer.get() + i * one, weights.back().buffer.get(), static_cast<size_t>(one));
    }
  }

  static PanelLayout layout_of(const PackedCase& c) {
    return panel_layout(c.k, c.group, c.bits, c.scale_bits);
  }

  // Which weight an index means.
  const Weights& at(int64_t index) const {
    const auto count = static_cast<int64_t>(weights.size());
    return weights[static_cast<size_t>(
        std::clamp<int64_t>(index < 0 ? index + count : index, 0, count - 1))];
  }

  int64_t one;
  Buffer buffer;
  std::vector<Weights> weights;
};

// Rows, columns, depths and groups of scales at which ways part; the last three by cuBLASLt.
constexpr PackedCase kCases[] = {
    {1, 64, 35, 0, 8, true, 1, 1},        {3, 96, 70, 32, 4, false, 0, 0, 16},
    {9, 64, 16, 32, 8, true, 0, 0},       {130, 32, 40, 0, 4, false, 2, 0},
    {257, 33, 35, 0, 8, true, 1, 1},      {259, 64, 130, 0, 4, false, 1, 1, 16},
    {288, 64, 33, 0, 8, true, 0, 0}};

// One of a stack has the bits of one alone.
TEST(cuda_matmuls_with_one_of_a_stack) {
  std::mt19937 random(61);
  for (const PackedCase& c : kCases) {
    Stack stack(3, c, random);
    PackedRun run(c, random);
    for (int32_t index : {0, 1, 2, -1, -3, 7, -9}) {
      const std::vector<int32_t> given = {index};
      run.args.stack = {};
      run.args.weight = stack.at(index).buffer.get();
      run.on_device();
      const std::vector<uint8_t> wanted(run.found.get(), run.found.get() + run.found.size());
      fill_nan(run.found);
      run.args.stack = {given.data(), 3, stack.one};
      // Several chunks of columns each find the weight.
      if (run.multiplied != 0) run.args.most = 1;
      run.args.weight = stack.buffer.get();
      run.on_device();
      run.args.most = 0;
      CHECK_THAT(run.sound && std::memcmp(run.found.get(), wanted.data(), wanted.size()) == 0,
                 run.text() + ", index " + std::to_string(index));
    }
  }
}

// Rows of each group with its weight, in float64. Rows that no group has are zero.
void check_groups(const PackedCase& c, const std::vector<int32_t>& sizes,
                  const std::vector<int32_t>& index, std::mt19937& random) {
  if (!takes_case()) return;
  Stack stack(4, c, random);
  PackedRun run(c, random);
  run.args.stack = {index.data(), 4, stack.one};
  run.args.sizes = sizes.data();
  run.args.row_groups = static_cast<int64_t>(sizes.size());
  run.args.weight = stack.buffer.get();
  run.on_device();
  const double step = c.out == 0 ? 1e-6 : c.out == 1 ? 8e-3 : 1e-3;
  const bool bad = std::any_of(sizes.begin(), sizes.end(), [](int32_t size) { return size < 0; });
  bool good = run.sound && run.multiplied == 0;
  size_t group = 0;
  int64_t left = sizes.empty() ? 0 : sizes[0];
  for (int64_t row = 0; row < c.m; ++row) {
    while (group < sizes.size() && left <= 0) left = ++group < sizes.size() ? sizes[group] : 0;
    --left;
    const std::vector<double> x = run.row_of_x(row);
    for (int64_t col = 0; col < c.n; ++col) {
      double sum = 0, size = 0;
      for (int64_t j = 0; group < sizes.size() && j < c.k; ++j) {
        const Weights& w = stack.at(index[group]);
        const double one = x[static_cast<size_t>(j)] * w.qvalue(j, col) *
                           static_cast<double>(w.scale(j, col));
        sum += one;
        size += std::fabs(one);
      }
      const double got = run.at(row * c.n + col);
      good = good && (bad ? std::isnan(got)
                          : std::fabs(got - sum) <= step * std::fabs(sum) + 1e-6 * size);
    }
  }
  CHECK_THAT(good, run.text() + ", " + std::to_string(sizes.size()) + " groups of rows");
}

TEST(cuda_matmuls_with_a_weight_for_each_group_of_rows) {
  std::mt19937 random(62);
  const std::vector<int32_t> any = {3, 0, -1, 9, 2};
  for (PackedCase c : kCases) {
    c.out = 0;
    const auto m = static_cast<int32_t>(c.m);
    check_groups(c, {m}, {1}, random);
    check_groups(c, {}, {}, random);
    check_groups(c, {0, m / 3, 0, 1, m / 2}, any, random);
    check_groups(c, {m, m, 0, 5, 0x7fffffff}, any, random);
    check_groups(c, {0, 0, 0, 0, 0}, any, random);
    check_groups(c, {1, -1, 1, 0, 0}, any, random);
  }
  // More groups than rows, and more than a block has threads.
  std::vector<int32_t> sizes(300, 0), index(300);
  for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<int32_t>(i % 4);
  sizes[7] = sizes[255] = 1;
  sizes[256] = sizes[299] = 2;
  check_groups({8, 64, 35, 0, 4, true, 1, 0}, sizes, index, random);
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = static_cast<int32_t>(i % 3);
  check_groups({270, 64, 16, 32, 8, false, 1, 0}, sizes, index, random);
}

}  // namespace

#endif
