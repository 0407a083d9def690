// The router on buffers of exactly their size, at odd addresses, at edge sizes, against double; and
// the choice against sorting.
#include "router/check.h"
#include "router/router.h"
#include "te/modes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "common/error.h"
#include "router/table.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using router::MapFormat;
using router::Options;
using router::Score;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

// Different numbers, of at most 8 bits, so that all formats have them.
Buffer distinct(int64_t rows, int64_t cols, DType dtype, std::mt19937& random) {
  Buffer buffer(rows * cols * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < cols; ++i) {
      row[static_cast<size_t>(i)] = static_cast<float>(i - cols / 2) / 64.0f;
    }
    std::shuffle(row.begin(), row.end(), random);
    for (int64_t i = 0; i < cols; ++i) {
      set_element(buffer.get(), dtype, r * cols + i, row[static_cast<size_t>(i)]);
    }
  }
  return buffer;
}

// Indices of the largest, ascending; of equal ones the first.
std::vector<int64_t> best(const std::vector<double>& scores, int64_t k) {
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

double score_of(double x, Score score) {
  if (score == Score::kSigmoid) return 1 / (1 + std::exp(-x));
  if (score == Score::kSqrtSoftplus) return std::sqrt(std::log1p(std::exp(x)));
  return x;
}

void softmax(std::vector<double>& row) {
  const double most = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (double& x : row) sum += x = std::exp(x - most);
  for (double& x : row) x /= sum;
}

void divide(std::vector<double>& row) {
  const double sum = std::accumulate(row.begin(), row.end(), 0.0);
  for (double& x : row) x /= sum;
}

// Weights (or scores) of a token, for any logits near those given: `chosen` stays.
std::vector<double> weights(const Options& o, const std::vector<double>& logits,
                            const std::vector<int64_t>& chosen) {
  std::vector<double> scores(logits);
  for (double& x : scores) x = score_of(x, o.score);
  const bool soft = o.score == Score::kSoftmax;
  if (soft && (o.pre_softmax || o.dense)) softmax(scores);
  if (o.dense) {
    if (!soft) divide(scores);
    return scores;
  }
  std::vector<double> picked, out(logits.size(), 0.0);
  for (int64_t i : chosen) picked.push_back(scores[static_cast<size_t>(i)]);
  if (soft && !o.pre_softmax) softmax(picked);
  if (!soft && o.topk > 1) divide(picked);
  for (size_t i = 0; i < picked.size(); ++i) {
    out[static_cast<size_t>(chosen[i])] = picked[i] * static_cast<double>(o.scaling);
  }
  return out;
}

std::vector<int64_t> choice(const Options& o, const std::vector<double>& logits,
                            const std::vector<float>& bias) {
  std::vector<double> scores(logits);  // softmax has the order of its logits, but not their sums
  for (double& x : scores) x = score_of(x, o.score);
  if (o.score == Score::kSoftmax && o.pre_softmax) softmax(scores);
  for (size_t i = 0; i < bias.size(); ++i) scores[i] += static_cast<double>(bias[i]);
  if (o.group_topk == 0) return best(scores, o.topk);
  const int64_t size = o.experts / o.groups;
  std::vector<double> sums;
  for (int64_t g = 0; g < o.groups; ++g) {
    const std::vector<double> group(scores.begin() + g * size, scores.begin() + (g + 1) * size);
    double sum = 0;
    for (int64_t i : best(group, o.topk / o.group_topk)) sum += group[static_cast<size_t>(i)];
    sums.push_back(sum);
  }
  std::vector<double> among(scores.size(), -std::numeric_limits<double>::infinity());
  for (int64_t g : best(sums, o.group_topk)) {
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      among[static_cast<size_t>(i)] = scores[static_cast<size_t>(i)];
    }
  }
  return best(among, o.topk);
}

void check_case(const Options& o, int64_t tokens, DType dtype, bool with_bias,
                std::mt19937& random, const Parallel& parallel) {
  if (!takes_case()) return;
  const int64_t experts = o.experts, size = tokens * experts;
  const auto bytes = static_cast<int64_t>(byte_size(dtype));
  const std::string what =
      std::to_string(tokens) + " x " + std::to_string(experts) + ", top " +
      std::to_string(o.topk) + ", score " + std::to_string(static_cast<int64_t>(o.score)) +
      (o.pre_softmax ? ", before" : "") + (o.dense ? ", dense" : "") + ", groups " +
      std::to_string(o.group_topk) + " of " + std::to_string(o.groups) + ", " + name(dtype) +
      (with_bias ? ", bias" : "") + (o.format == MapFormat::kBits ? ", bits" : "");
  const Buffer logits = distinct(tokens, experts, dtype, random);
  std::vector<float> bias;
  if (with_bias) {
    for (int64_t i = 0; i < experts; ++i) {
      bias.push_back(static_cast<float>(random() % 1000) * 1.7e-3f);
    }
  }
  const int64_t row = router::map_bytes(o.format, experts);
  Buffer probs(size * bytes, dtype == DType::F32 ? 8 : 6), map(tokens * row, 1);
  Buffer saved(size * 4, 4);
  router::Forward args;
  args.options = o;
  args.tokens = tokens;
  args.dtype = te::float_of(dtype);
  args.logits = logits.get();
  args.bias = with_bias ? bias.data() : nullptr;
  args.probs = probs.get();
  args.map = map.get();
  args.saved = reinterpret_cast<float*>(saved.get());
  router::forward(args, parallel);

  Buffer grad(size * bytes, dtype == DType::F32 ? 4 : 2), out(size * bytes, 2 * bytes);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < size; ++i) set_element(grad.get(), dtype, i, normal(random));
  router::Backward undo;
  undo.options = o;
  undo.tokens = tokens;
  undo.dtype = args.dtype;
  undo.map = map.get();
  undo.saved = args.saved;
  undo.grad = grad.get();
  undo.out = out.get();
  router::backward(undo, parallel);

  const double step = dtype == DType::F32 ? 4e-6 : dtype == DType::F16 ? 6e-4 : 5e-3;
  bool good = true, good_map = true, good_grad = true;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<double> x;
    for (int64_t i = 0; i < experts; ++i) x.push_back(element(logits.get(), dtype, t * experts + i));
    const std::vector<int64_t> chosen = choice(o, x, bias);
    for (int64_t i = 0; i < experts; ++i) {
      const bool wanted = std::binary_search(chosen.begin(), chosen.end(), i);
      const uint8_t* at = map.get() + t * row;
      const int found = o.format == MapFormat::kBits ? at[i / 8] >> (i % 8) & 1 : at[i];
      good_map = good_map && found == static_cast<int>(wanted);
    }
    const std::vector<double> wanted = weights(o, x, chosen);
    for (int64_t i = 0; i < experts; ++i) {
      const double found = element(probs.get(), dtype, t * experts + i);
      const double w = wanted[static_cast<size_t>(i)];
      good = good && std::fabs(found - w) <= step * std::fabs(w) + 1e-7;
    }
    if (t % 7 != 0) continue;
    // The gradient, by differences of weights in double.
    for (int64_t i = 0; i < experts; i += experts > 40 ? 5 : 1) {
      constexpr double kStep = 1e-5;
      std::vector<double> up(x), down(x);
      up[static_cast<size_t>(i)] += kStep;
      down[static_cast<size_t>(i)] -= kStep;
      const std::vector<double> high = weights(o, up, chosen), low = weights(o, down, chosen);
      double slope = 0, most = 0;
      for (int64_t j = 0; j < experts; ++j) {
        const auto at = static_cast<size_t>(j);
        const double part = element(grad.get(), dtype, t * experts + j) * (high[at] - low[at]) /
                            (2 * kStep);
        slope += part;
        most += std::fabs(part);
      }
      const double found = element(out.get(), dtype, t * experts + i);
      good_grad = good_grad && std::fabs(found - slope) <= step * (std::fabs(slope) + most) + 1e-6;
    }
  }
  CHECK_THAT(good, what);
  CHECK_THAT(good_map, "map, " + what);
  CHECK_THAT(good_grad, "gradient, " + what);
}

TEST(router_of_tokens) {
  std::mt19937 random(21);
  Threads pool(2);
  const Parallel two(pool), one;
  for (DType dtype : kFloats) {
    for (Score score : {Score::kSigmoid, Score::kSoftmax, Score::kSqrtSoftplus}) {
      for (int64_t experts : {1, 3, 8, 15, 16, 17, 33, 64, 100, 256}) {
        for (int64_t topk : {1, 2, 8, 9, 16, 17, 32, 33, 200}) {
          if (topk > experts) continue;
          Options o;
          o.experts = experts;
          o.topk = topk;
          o.score = score;
          o.format = topk % 2 == 0 ? MapFormat::kBits : MapFormat::kBytes;
          o.scaling = 1.25f;
          check_case(o, 9, dtype, false, random, one);
          o.pre_softmax = true;
          check_case(o, 8, dtype, score != Score::kSoftmax, random, one);
          o.pre_softmax = false;
          o.scaling = 1.0f;
          o.dense = true;
          check_case(o, 8, dtype, false, random, one);
        }
      }
      for (auto [experts, groups, chosen, topk] :
           {std::array<int64_t, 4>{32, 4, 2, 4}, {60, 5, 3, 6}, {256, 8, 4, 8}, {24, 24, 6, 6},
            {64, 2, 1, 30}}) {
        Options o;
        o.experts = experts;
        o.groups = groups;
        o.group_topk = chosen;
        o.topk = topk;
        o.score = score;
        o.pre_softmax = experts == 60;
        check_case(o, 16, dtype, score == Score::kSigmoid, random, one);
      }
    }
  }
  Options o;
  o.experts = 128;
  o.topk = 8;
  check_case(o, 0, DType::F32, false, random, two);
  check_case(o, 600, DType::F32, false, random, two);
  o.experts = 3000;
  o.topk = 2500;
  o.pre_softmax = true;
  check_case(o, 7, DType::F32, false, random, two);
}

TEST(router_choice_among_equals) {
  // Few different numbers, signed zeros, infinities and NaN, as sorting by bits has them.
  std::mt19937 random(22);
  const float some[] = {0.0f, -0.0f, 1.0f, -1.0f, std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()};
  for (int kinds : {1, 2, 3, 7}) {
    for (int64_t n : {1, 5, 16, 40, 64, 129, 700}) {
      for (int64_t k : {1, 2, 8, 11, 16, 24, 33, 128}) {
        if (k > n) continue;
        Buffer logits(4 * n, 4), probs(4 * n, 4), saved(4 * n, 8), map(n, 1);
        std::vector<float> x;
        for (int64_t i = 0; i < n; ++i) {
          x.push_back(some[random() % static_cast<unsigned>(kinds)]);
          set_element(logits.get(), DType::F32, i, x.back());
        }
        std::vector<int32_t> chosen(static_cast<size_t>(k));
        router::select_any(x.data(), n, k, chosen.data());
        const auto key = [&](int64_t i) {
          const auto bits = static_cast<int32_t>(float_bits(x[static_cast<size_t>(i)]));
          return bits < 0 ? bits ^ 0x7fffffff : bits;
        };
        std::vector<double> order;
        for (int64_t i = 0; i < n; ++i) order.push_back(key(i));
        const std::vector<int64_t> wanted = best(order, k);
        CHECK(std::equal(wanted.begin(), wanted.end(), chosen.begin(), chosen.end()));
        router::Forward args;
        args.options.experts = n;
        args.options.topk = k;
        args.tokens = 1;
        args.logits = logits.get();
        args.probs = probs.get();
        args.map = map.get();
        args.saved = reinterpret_cast<float*>(saved.get());
        router::forward(args, Parallel());
        bool good = true;
        for (int64_t i = 0; i < n; ++i) {
          const bool is = std::binary_search(wanted.begin(), wanted.end(), i);
          good = good && map.get()[i] == static_cast<uint8_t>(is);
        }
        CHECK_THAT(good, std::to_string(kinds) + " kinds, " + std::to_string(k) + " of " +
                             std::to_string(n));
      }
    }
  }
}

TEST(router_loss) {
  std::mt19937 random(23);
  Threads pool(2);
  const Parallel two(pool), one;
  std::normal_distribution<float> normal;
  for (DType dtype : kFloats) {
    for (int64_t tokens : {0, 1, 5, 128, 129, 1000}) {
      for (int64_t experts : {1, 7, 16, 33, 128}) {
        const auto bytes = static_cast<int64_t>(byte_size(dtype));
        Buffer probs(tokens * experts * bytes, bytes), out(tokens * experts * bytes, bytes);
        std::vector<float> counts;
        for (int64_t i = 0; i < experts; ++i) counts.push_back(static_cast<float>(random() % 100));
        double sum = 0, size_of_it = 0;
        for (int64_t i = 0; i < tokens * experts; ++i) {
          set_element(probs.get(), dtype, i, normal(random));
          const double part = element(probs.get(), dtype, i) *
                              static_cast<double>(counts[static_cast<size_t>(i % experts)]);
          sum += part;
          size_of_it += std::fabs(part);
        }
        router::Loss args;
        args.tokens = tokens;
        args.experts = experts;
        args.dtype = te::float_of(dtype);
        args.coefficient = router::coefficient(tokens, experts, 4, 0.01);
        const double scale = static_cast<double>(args.coefficient);
        const float found = router::loss(args, probs.get(), counts.data(), two);
        CHECK(std::fabs(static_cast<double>(found) - sum * scale) <= 1e-6 * size_of_it * scale);
        CHECK(float_bits(found) == float_bits(router::loss(args, probs.get(), counts.data(), one)));
        router::loss_gradient(args, counts.data(), 3.0f, out.get(), two);
        bool good = true;
        for (int64_t i = 0; i < tokens * experts; ++i) {
          const double wanted =
              3 * scale * static_cast<double>(counts[static_cast<size_t>(i % experts)]);
          const double step = dtype == DType::F32 ? 1e-6 : dtype == DType::F16 ? 6e-4 : 5e-3;
          good = good && std::fabs(element(out.get(), dtype, i) - wanted) <= step * wanted + 6e-8;
        }
        CHECK(good);
      }
    }
  }
}

TEST(router_refuses) {
  Options o;
  o.experts = 12;
  o.topk = 0;
  CHECK(throws<Error>([&] { router::check(o); }, "topk must ... got 0"));
  o.topk = 13;
  router::check(o);
  CHECK(throws<Error>([&] { router::check_experts(o); }, "topk must ... got 13"));
  o.topk = 4;
  o.score = static_cast<Score>(3);
  CHECK(throws<Error>([&] { router::check(o); }, "score_function must ... got 3"));
  o.score = Score::kSigmoid;
  o.format = static_cast<MapFormat>(2);
  CHECK(throws<Error>([&] { router::check(o); }, "routing_map_format must ... got 2"));
  o.format = MapFormat::kBits;
  o.group_topk = 3;
  o.groups = 4;
  CHECK(throws<Error>([&] { router::check(o); }, "group_topk must ... got 3"));
  o.group_topk = 2;
  o.groups = 1;
  CHECK(throws<Error>([&] { router::check(o); }, "num_groups must ... got 1"));
  o.groups = 5;
  router::check(o);
  CHECK(throws<Error>([&] { router::check_experts(o); }, "num_groups must ... got 5"));
  o.groups = 12;
  CHECK(throws<Error>([&] { router::check_experts(o); }, "topk / group_topk must ... got 2"));
}

}  // namespace
