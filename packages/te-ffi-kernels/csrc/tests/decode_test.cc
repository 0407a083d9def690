// Attention over a cache in buffers of exactly their size, at odd addresses, at edge sizes, against
// double.
#include "decode/decode.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

struct Case {
  int64_t batch, queries, kv_heads, group, positions, size;
  DType q, cache;
  int64_t window;
  bool masked;
  bool heads_first;
};

Buffer numbers(int64_t count, DType dtype, std::mt19937& random) {
  Buffer buffer(count * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == DType::S8) {
      buffer.get()[i] = static_cast<uint8_t>(random());
    } else {
      set_element(buffer.get(), dtype, i, normal(random));
    }
  }
  return buffer;
}

double at(const Buffer& buffer, DType dtype, int64_t i) {
  return dtype == DType::S8 ? static_cast<int8_t>(buffer.get()[i]) : element(buffer.get(), dtype, i);
}

void check_case(const Case& c, std::mt19937& random, const Parallel& parallel) {
  if (!takes_case()) return;
  const int64_t rows = c.batch * c.queries * c.kv_heads * c.group;
  const int64_t places = c.batch * c.kv_heads * c.positions;
  Buffer q = numbers(rows * c.size, c.q, random);
  Buffer keys = numbers(places * c.size, c.cache, random);
  Buffer values = numbers(places * c.size, c.cache, random);
  const bool scaled = c.cache == DType::S8;
  std::vector<float> key_scales(places), value_scales(places);
  for (float& scale : key_scales) scale = 0.001f * static_cast<float>(1 + random() % 20);
  for (float& scale : value_scales) scale = 0.001f * static_cast<float>(1 + random() % 20);
  std::vector<int32_t> lengths(c.batch);
  for (int64_t b = 0; b < c.batch; ++b) {
    lengths[b] = static_cast<int32_t>(b == 0 ? c.positions : random() % (c.positions + 2));
  }
  Buffer mask(c.masked ? c.batch * c.queries * c.positions : 0, 1);
  for (int64_t i = 0; i < mask.size(); ++i) mask.get()[i] = random() % 2;
  Buffer out(rows * c.size * static_cast<int64_t>(byte_size(c.q)), c.q == DType::F32 ? 8 : 6);

  decode::Attention args;
  args.batch = c.batch;
  args.queries = c.queries;
  args.kv_heads = c.kv_heads;
  args.group = c.group;
  args.positions = c.positions;
  args.size = c.size;
  args.q = q.get();
  args.q_dtype = args.out_dtype = c.q;
  args.keys = keys.get();
  args.values = values.get();
  args.cache_dtype = c.cache;
  if (scaled) {
    args.key_scales = key_scales.data();
    args.value_scales = value_scales.data();
  }
  args.lengths = lengths.data();
  if (c.masked) {
    args.mask = mask.get();
    args.mask_batch = c.batch;
    args.mask_queries = c.queries;
  }
  args.heads_first = c.heads_first;
  args.window = c.window;
  args.scale = 0.25f;
  args.out = out.get();
  decode::attend(args, parallel);

  bool good = true;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / c.group % c.kv_heads;
    const int64_t query = row / (c.group * c.kv_heads) % c.queries;
    const int64_t b = row / (c.group * c.kv_heads * c.queries);
    const int64_t last = lengths[b] - c.queries + 1 + query;
    const int64_t first = c.window == 0 ? 0 : last - c.window;
    // Rows of the cache, as their positions have them.
    const auto place = [&](int64_t p) {
      return c.heads_first ? (b * c.kv_heads + head) * c.positions + p
                           : (b * c.positions + p) * c.kv_heads + head;
    };
    std::vector<double> logits(c.positions, -1e300);
    double most = -1e300, sum = 0;
    for (int64_t p = 0; p < c.positions; ++p) {
      if (p < first || p >= last) continue;
      if (c.masked && mask.get()[(b * c.queries + query) * c.positions + p] == 0) continue;
      double logit = 0;
      for (int64_t i = 0; i < c.size; ++i) {
        logit += at(q, c.q, row * c.size + i) * at(keys, c.cache, place(p) * c.size + i);
      }
      logits[p] = 0.25 * logit * (scaled ? static_cast<double>(key_scales[place(p)]) : 1.0);
      most = std::fmax(most, logits[p]);
    }
    for (int64_t p = 0; p < c.positions; ++p) {
      if (logits[p] > -1e300) sum += std::exp(logits[p] - most);
    }
    for (int64_t i = 0; i < c.size; ++i) {
      double total = 0;
      for (int64_t p = 0; p < c.positions && sum > 0; ++p) {
        if (logits[p] == -1e300) continue;
        const double value = at(values, c.cache, place(p) * c.size + i);
        total += std::exp(logits[p] - most) / sum * value *
                 (scaled ? static_cast<double>(value_scales[place(p)]) : 1.0);
      }
      const double rounding = c.q == DType::F32 ? 3e-6 : c.q == DType::F16 ? 1e-3 : 8e-3;
      good = good && std::fabs(element(out.get(), c.q, row * c.size + i) - total) <=
                         rounding * (1 + std::fabs(total));
    }
  }
  CHECK_THAT(good, std::to_string(c.batch) + " x " + std::to_string(c.queries) + " x " +
                       std::to_string(c.kv_heads) + " x " + std::to_string(c.group) + " over " +
                       std::to_string(c.positions) + " x " + std::to_string(c.size) + ", " +
                       name(c.q) + " and " + name(c.cache) + ", window " +
                       std::to_string(c.window) + (c.masked ? ", masked" : "") +
                       (c.heads_first ? "" : ", positions first"));
}

TEST(attention_over_a_cache) {
  std::mt19937 random(5);
  Threads pool(2);
  const Parallel two(pool), one;
  constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};
  constexpr DType kCaches[] = {DType::F32, DType::BF16, DType::F16, DType::S8};
  for (DType cache : kCaches) {
    for (int64_t size : {1, 7, 16, 40, 64, 129}) {
      for (int64_t positions : {0, 1, 15, 64, 65, 150}) {
        for (bool masked : {false, true}) {
          check_case({2, 1, 2, 2, positions, size, DType::F32, cache, 0, masked, true}, random, one);
          check_case({2, 2, 3, 2, positions, size, DType::F32, cache, 0, masked, false}, random, one);
          check_case({1, 3, 1, 3, positions, size, DType::F32, cache, 20, masked, true}, random, two);
        }
      }
    }
    for (DType q : kFloats) {
      check_case({2, 2, 2, 4, 1100, 64, q, cache, 0, false, true}, random, two);
      check_case({2, 1, 1, 5, 1100, 64, q, cache, 600, true, false}, random, two);
    }
  }
}

// The result must not depend on who worked on it.
TEST(attention_over_a_cache_with_threads) {
  std::mt19937 random(6);
  Threads pool(3);
  const int64_t count = 4 * 1500 * 64;
  Buffer q = numbers(8 * 64, DType::F32, random), keys = numbers(count, DType::F32, random);
  Buffer values = numbers(count, DType::F32, random);
  const int32_t length = 1400;
  std::vector<float> first(8 * 64), second(8 * 64);
  decode::Attention args;
  args.batch = args.queries = 1;
  args.kv_heads = 4;
  args.group = 2;
  args.positions = 1500;
  args.size = 64;
  args.q = q.get();
  args.keys = keys.get();
  args.values = values.get();
  args.lengths = &length;
  args.out = first.data();
  decode::attend(args, Parallel());
  args.out = second.data();
  decode::attend(args, Parallel(pool));
  CHECK(first == second);
}

}  // namespace
