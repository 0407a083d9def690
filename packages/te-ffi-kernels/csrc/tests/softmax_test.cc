// Softmax and its gradient on buffers of exactly their size, at odd addresses, at edge sizes,
// against double.
#include "softmax/softmax.h"

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

Buffer numbers(int64_t count, DType dtype, std::mt19937& random) {
  Buffer buffer(count * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (int64_t i = 0; i < count; ++i) set_element(buffer.get(), dtype, i, normal(random));
  return buffer;
}

double rounding(DType dtype) {
  return dtype == DType::F32 ? 1e-6 : dtype == DType::F16 ? 5e-4 : 4e-3;
}

struct Case {
  int64_t batch, heads, q, k, masks;  // no masks: 0
  DType dtype;
  bool causal;
};

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel) {
  if (!takes_case()) return;
  const int64_t size = c.batch * c.heads * c.q * c.k;
  const std::string what = std::to_string(c.batch) + " x " + std::to_string(c.heads) + " x " +
                           std::to_string(c.q) + " x " + std::to_string(c.k) + ", " +
                           std::to_string(c.masks) + " masks, " + name(c.dtype) +
                           (c.causal ? ", causal" : "");
  const float scale = 0.7f;
  Buffer x = numbers(size, c.dtype, random);
  Buffer mask(c.masks * c.q * c.k, 1);
  for (int64_t i = 0; i < mask.size(); ++i) {
    // 1 leaves out, other numbers don't. The first row has nothing left.
    mask.get()[i] = i < c.k ? 1 : static_cast<uint8_t>(random() % 3);
  }
  const auto left_out = [&](int64_t b, int64_t i, int64_t j) {
    if (c.causal && j > i) return true;
    return c.masks != 0 && mask.get()[(b % c.masks * c.q + i) * c.k + j] == 1;
  };
  if (c.causal) {  // what is beyond the diagonal isn't read
    for (int64_t row = 0; row < c.batch * c.heads * c.q; ++row) {
      for (int64_t j = row % c.q + 1; j < c.k; ++j) {
        set_element(x.get(), c.dtype, row * c.k + j, kNan);
      }
    }
  }
  Buffer out(size * static_cast<int64_t>(byte_size(c.dtype)), c.dtype == DType::F32 ? 8 : 6);
  softmax::Forward args;
  args.shape = {c.batch, c.heads, c.q, c.k, te::float_of(c.dtype), c.causal};
  args.scale = scale;
  args.x = x.get();
  args.mask = c.masks != 0 ? mask.get() : nullptr;
  args.masks = std::max<int64_t>(1, c.masks);
  args.out = out.get();
  softmax::forward(args, parallel);

  Buffer grad = numbers(size, c.dtype, random);
  if (c.causal) {
    for (int64_t row = 0; row < c.batch * c.heads * c.q; ++row) {
      for (int64_t j = row % c.q + 1; j < c.k; ++j) {
        set_element(grad.get(), c.dtype, row * c.k + j, kNan);
      }
    }
  }
  Buffer dx(out.size(), c.dtype == DType::F32 ? 4 : 2);
  softmax::Backward undo;
  undo.shape = args.shape;
  undo.scale = scale;
  undo.grad = grad.get();
  undo.softmax = out.get();
  undo.out = dx.get();
  softmax::backward(undo, parallel);

  bool good = true, good_grad = true;
  for (int64_t row = 0; row < c.batch * c.heads * c.q; ++row) {
    const int64_t b = row / (c.heads * c.q), i = row % c.q;
    double most = -1e300, sum = 0, dot = 0, dot_size = 0;
    for (int64_t j = 0; j < c.k; ++j) {
      if (left_out(b, i, j)) continue;
      most = std::fmax(most, scale * element(x.get(), c.dtype, row * c.k + j));
    }
    for (int64_t j = 0; j < c.k; ++j) {
      if (left_out(b, i, j)) continue;
      sum += std::exp(static_cast<double>(scale) * element(x.get(), c.dtype, row * c.k + j) - most);
      const double part = element(out.get(), c.dtype, row * c.k + j) *
                          element(grad.get(), c.dtype, row * c.k + j);
      dot += part;
      dot_size += std::fabs(part);
    }
    for (int64_t j = 0; j < c.k; ++j) {
      const int64_t at = row * c.k + j;
      const double found = element(out.get(), c.dtype, at), slope = element(dx.get(), c.dtype, at);
      if (left_out(b, i, j)) {
        good = good && found == 0;
        good_grad = good_grad && slope == 0;
        continue;
      }
      const double wanted =
          std::exp(static_cast<double>(scale) * element(x.get(), c.dtype, at) - most) / sum;
      good = good && std::fabs(found - wanted) <= (rounding(c.dtype) + 3e-6) * wanted + 4e-8;
      const double dz = element(grad.get(), c.dtype, at);
      const double expected = scale * found * (dz - dot);
      const double size_of_it = scale * found * (std::fabs(dz) + dot_size);
      good_grad = good_grad && std::fabs(slope - expected) <= rounding(c.dtype) *
                                   std::fabs(expected) + 2e-6 * size_of_it + 1e-7;
    }
  }
  CHECK_THAT(good, what);
  CHECK_THAT(good_grad, "gradient, " + what);
}

TEST(softmax_of_rows) {
  std::mt19937 random(11);
  Threads pool(2);
  const Parallel two(pool), one;
  for (DType dtype : kFloats) {
    for (int64_t k : {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 130, 1031}) {
      for (int64_t q : {0, 1, 5, 33}) {
        const Parallel& parallel = q == 33 ? two : one;
        for (bool causal : {false, true}) {
          check_case({2, 3, q, k, 0, dtype, causal}, random, parallel);
        }
        check_case({4, 3, q, k, 1, dtype, false}, random, parallel);
        check_case({4, 1, q, k, 4, dtype, false}, random, parallel);
        check_case({4, 2, q, k, 2, dtype, false}, random, parallel);
      }
    }
  }
  check_case({1, 2, 70, 3000, 0, DType::BF16, true}, random, two);
  check_case({1, 2, 3, 40000, 1, DType::F32, false}, random, two);
}

TEST(softmax_of_what_is_not_finite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (float bad : {kNan, kInfinity}) {
    for (int64_t k : {1, 5, 16, 37}) {
      std::vector<float> x(static_cast<size_t>(k), 1.0f), out(x.size());
      std::vector<uint8_t> mask(x.size());
      x.back() = bad;
      mask[0] = k > 1;
      softmax::Forward args;
      args.shape = {1, 1, 1, k, te::Float::kF32, false};
      args.x = x.data();
      args.out = out.data();
      softmax::forward(args, Parallel());
      CHECK(std::all_of(out.begin(), out.end(), [](float y) { return std::isnan(y); }));
      args.mask = mask.data();
      softmax::forward(args, Parallel());
      for (size_t i = 0; i < out.size(); ++i) CHECK(mask[i] ? out[i] == 0 : std::isnan(out[i]));
      // Left out, it has no effect.
      mask.assign(mask.size(), 0);
      mask.back() = 1;
      softmax::forward(args, Parallel());
      for (size_t i = 0; i < out.size(); ++i) {
        const float wanted = mask[i] ? 0.0f : 1.0f / static_cast<float>(k - 1);
        CHECK(std::fabs(out[i] - wanted) <= 1e-6f);
      }
    }
  }
  // -infinity is a logit as any other, unless there's nothing else.
  const float x[] = {-kInfinity, 0.0f, -kInfinity, -kInfinity};
  float out[4];
  softmax::Forward args;
  args.shape = {1, 1, 2, 2, te::Float::kF32, false};
  args.x = x;
  args.out = out;
  softmax::forward(args, Parallel());
  CHECK(out[0] == 0.0f && out[1] == 1.0f && std::isnan(out[2]) && std::isnan(out[3]));
  const uint8_t mask[] = {0, 0, 0, 1};
  args.mask = mask;
  softmax::forward(args, Parallel());
  CHECK(out[0] == 0.0f && out[1] == 1.0f && std::isnan(out[2]) && out[3] == 0.0f);
}

}  // namespace
