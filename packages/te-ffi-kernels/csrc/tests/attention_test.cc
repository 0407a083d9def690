// Attention and its gradients on buffers of exactly their size, at odd addresses and edge sizes,
// against sums in double. Dropout is compared through the random words that it is drawn from.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "common/amx_tile.h"
#include "common/convert.h"
#include "common/isa.h"
#include "common/philox.h"
#include "tests/check.h"
#include "tests/weights.h"

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using attention::Bias;
using attention::Gradients;
using attention::Problem;
using attention::Segment;

struct Case {
  DType dtype;
  int64_t batch, heads, kv_heads, queries, keys, qk_size, v_size;
  int64_t left = -1, right = -1;
  bool bottom_right = false;
  Bias bias = Bias::kNone;
  int64_t bias_batches = 1, bias_heads = 1;
  bool sink = false;
  float dropout = 0;
  bool short_ones = false;  // segments shorter than what there is
  float scale = 0.3f;

  int64_t q_length(int64_t b) const { return short_ones ? queries * (b + 1) / (batch + 1) : queries; }
  int64_t kv_length(int64_t b) const { return short_ones ? keys * (batch - b) / (batch + 1) : keys; }
};

Buffer numbers(int64_t count, DType dtype, std::mt19937& random) {
  Buffer buffer(count * static_cast<int64_t>(byte_size(dtype)), dtype == DType::F32 ? 4 : 2);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (int64_t i = 0; i < count; ++i) set_element(buffer.get(), dtype, i, normal(random));
  return buffer;
}

Segment segment_of(const void* context, int64_t i) {
  const Case& c = *static_cast<const Case*>(context);
  Segment segment;
  segment.q_start = i * c.queries;
  segment.kv_start = i * c.keys;
  segment.q_length = c.q_length(i);
  segment.kv_length = c.kv_length(i);
  segment.batch = segment.number = i;
  segment.aux_start = i * c.heads * c.queries;
  return segment;
}

bool keeps(const Case& c, int64_t batch, int64_t head, int64_t i, int64_t j) {
  uint32_t words[4] = {static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i),
                       static_cast<uint32_t>(batch * c.heads + head), 0};
  philox(words[0], words[1], words[2], words[3], 7, 9);
  return words[j % 4] >= static_cast<uint32_t>(static_cast<double>(c.dropout) * 4294967296.0);
}

// What runs here, and of bfloat16 also the emulation of tiles where they are not real.
std::vector<Isa> tested_isas(DType dtype) {
  std::vector<Isa> isas = {selected_isa()};
#if defined(JAXTAP_EMULATE_AMX)
  const bool once = isas[0] == available_isas().back();
  if (once && isas[0] != Isa::kAmx && dtype == DType::BF16) isas.push_back(Isa::kAmx);
#endif
  (void)dtype;
  return isas;
}

// Of each element the sum, and the sum of magnitudes, which bounds the rounding.
struct Sum {
  double value = 0, size = 0;
  void add(double x) {
    value += x;
    size += std::fabs(x);
  }
};

class Checker {
 public:
  Checker(const Case& c, std::mt19937& random)
      : c_(c),
        q_(numbers(c.batch * c.queries * c.heads * c.qk_size, c.dtype, random)),
        k_(numbers(c.batch * c.keys * c.kv_heads * c.qk_size, c.dtype, random)),
        v_(numbers(c.batch * c.keys * c.kv_heads * c.v_size, c.dtype, random)),
        grad_(numbers(c.batch * c.queries * c.heads * c.v_size, c.dtype, random)),
        bias_(numbers(bias_size(), c.dtype, random)),
        sink_(static_cast<size_t>(c.heads)) {
    for (float& s : sink_) s = std::normal_distribution<float>()(random);
  }

  void run(const Parallel& parallel) {
    expect();
    for (Isa isa : tested_isas(c_.dtype)) run(parallel, isa);
  }

  void run(const Parallel& parallel, Isa isa) {
    Buffer out = zeros(c_.batch * c_.queries * c_.heads * c_.v_size);
    std::vector<float> aux(static_cast<size_t>(c_.batch * c_.heads * c_.queries));
    Problem p;
    p.dtype = c_.dtype;
    p.segments = c_.batch;
    p.segment = segment_of;
    p.context = &c_;
    p.most_queries = c_.queries;
    p.most_keys = c_.keys;
    p.q_heads = c_.heads;
    p.kv_heads = c_.kv_heads;
    p.qk_size = c_.qk_size;
    p.v_size = c_.v_size;
    p.q = {q_.get(), c_.heads * c_.qk_size, c_.qk_size};
    p.k = {k_.get(), c_.kv_heads * c_.qk_size, c_.qk_size};
    p.v = {v_.get(), c_.kv_heads * c_.v_size, c_.v_size};
    p.out = {out.get(), c_.heads * c_.v_size, c_.v_size};
    p.scale = c_.scale;
    p.bias_type = c_.bias;
    p.bias = bias_.get();
    p.bias_batches = c_.bias_batches;
    p.bias_heads = c_.bias_heads;
    p.left = c_.left;
    p.right = c_.right;
    p.bottom_right = c_.bottom_right;
    if (c_.sink) p.sink = sink_.data();
    p.aux = aux.data();
    p.aux_head_stride = c_.queries;
    p.dropout = c_.dropout;
    p.seed[0] = 7;
    p.seed[1] = 9;
    attention::forward(p, parallel, isa);

    Buffer q_grad = zeros(c_.batch * c_.queries * c_.heads * c_.qk_size);
    Buffer k_grad = zeros(c_.batch * c_.keys * c_.kv_heads * c_.qk_size);
    Buffer v_grad = zeros(c_.batch * c_.keys * c_.kv_heads * c_.v_size);
    Buffer bias_grad = zeros(bias_size());
    std::vector<float> sink_grad(sink_.size());
    Gradients g;
    g.out_grad = {grad_.get(), c_.heads * c_.v_size, c_.v_size};
    g.q_grad = {q_grad.get(), c_.heads * c_.qk_size, c_.qk_size};
    g.k_grad = {k_grad.get(), c_.kv_heads * c_.qk_size, c_.qk_size};
    g.v_grad = {v_grad.get(), c_.kv_heads * c_.v_size, c_.v_size};
    if (c_.bias != Bias::kNone) g.bias_grad = bias_grad.get();
    if (c_.sink) g.sink_grad = sink_grad.data();
    attention::backward(p, g, parallel, isa);

    isa_ = isa;
    const double step = c_.dtype == DType::F32 ? 2e-6 : c_.dtype == DType::F16 ? 2e-3 : 1.6e-2;
    near(out, out_, step, "out");
    near(q_grad, q_grad_, step, "q_grad");
    near(k_grad, k_grad_, step, "k_grad");
    near(v_grad, v_grad_, step, "v_grad");
    if (c_.bias != Bias::kNone) near(bias_grad, bias_grad_, step, "bias_grad");
    bool good = true;
    for (size_t i = 0; c_.sink && i < sink_.size(); ++i) {
      const double error = std::fabs(static_cast<double>(sink_grad[i]) - sink_grad_[i].value);
      good = good && error <= 10 * step * sink_grad_[i].size + 1e-6;
    }
    for (size_t i = 0; i < aux.size(); ++i) {
      const double found = static_cast<double>(aux[i]);
      const int64_t row = static_cast<int64_t>(i) % c_.queries;
      const int64_t b = static_cast<int64_t>(i) / c_.queries / c_.heads;
      if (row >= c_.q_length(b)) continue;
      good = good && (found == aux_[i] || std::fabs(found - aux_[i]) <= 1e-5 * (1 + std::fabs(aux_[i])));
    }
    CHECK_THAT(good, "sums, " + text());
  }

 private:
  int64_t bias_size() const {
    return c_.bias == Bias::kNone ? 0 : c_.bias_batches * c_.bias_heads * c_.queries * c_.keys;
  }

  Buffer zeros(int64_t count) const {
    const int64_t bytes = count * static_cast<int64_t>(byte_size(c_.dtype));
    Buffer buffer(bytes, c_.dtype == DType::F32 ? 4 : 2);
    std::memset(buffer.get(), 0, static_cast<size_t>(bytes));
    return buffer;
  }

  double get(const Buffer& buffer, int64_t index) const {
    return element(buffer.get(), c_.dtype, index);
  }

  void near(const Buffer& found, const std::vector<Sum>& wanted, double step,
            const std::string& name) const {
    double worst = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double error = std::fabs(get(found, static_cast<int64_t>(i)) - wanted[i].value);
      worst = std::fmax(worst, error / (wanted[i].size + 1e-3));
      if (!(error == error)) worst = 1e9;
    }
    CHECK_THAT(worst <= 2 * step, name + " is off by " + std::to_string(worst) + ", " + text());
  }

  std::string text() const {
    std::string all = name(c_.dtype);
    for (int64_t x : {c_.batch, c_.heads, c_.kv_heads, c_.queries, c_.keys, c_.qk_size, c_.v_size,
                      c_.left, c_.right, static_cast<int64_t>(c_.bottom_right),
                      static_cast<int64_t>(c_.bias), static_cast<int64_t>(c_.sink)}) {
      all += " " + std::to_string(x);
    }
    return all + " " + name(isa_) + " " + std::to_string(c_.dropout) + " " + std::to_string(c_.scale);
  }

  void expect() {
    const Case& c = c_;
    out_.resize(static_cast<size_t>(c.batch * c.queries * c.heads * c.v_size));
    q_grad_.resize(static_cast<size_t>(c.batch * c.queries * c.heads * c.qk_size));
    k_grad_.resize(static_cast<size_t>(c.batch * c.keys * c.kv_heads * c.qk_size));
    v_grad_.resize(static_cast<size_t>(c.batch * c.keys * c.kv_heads * c.v_size));
    bias_grad_.resize(static_cast<size_t>(bias_size()));
    sink_grad_.resize(sink_.size());
    aux_.resize(static_cast<size_t>(c.batch * c.heads * c.queries));
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t i = 0; i < c.q_length(b); ++i) expect_row(b, h, i);
      }
    }
  }

  void expect_row(int64_t b, int64_t h, int64_t i) {
    const Case& c = c_;
    const int64_t kv_head = h / (c.heads / c.kv_heads), keys = c.kv_length(b);
    const int64_t shift = c.bottom_right ? keys - c.q_length(b) : 0;
    const double keep = c.dropout > 0 ? 1 / (1 - static_cast<double>(c.dropout)) : 1;
    const double scale = static_cast<double>(c.scale);
    const int64_t q = ((b * c.queries + i) * c.heads + h) * c.qk_size;
    const int64_t o = ((b * c.queries + i) * c.heads + h) * c.v_size;
    const auto k = [&](int64_t j) { return ((b * c.keys + j) * c.kv_heads + kv_head) * c.qk_size; };
    const auto v = [&](int64_t j) { return ((b * c.keys + j) * c.kv_heads + kv_head) * c.v_size; };
    const auto bias_at = [&](int64_t j) {
      const int64_t bb = c.bias_batches == 1 ? 0 : b, hh = c.bias_heads == 1 ? 0 : h;
      return ((bb * c.bias_heads + hh) * c.queries + i) * c.keys + j;
    };
    std::vector<double> s(static_cast<size_t>(keys), -INFINITY), d(s.size());
    const double sink = static_cast<double>(sink_[static_cast<size_t>(h)]);
    double top = c.sink ? sink : -INFINITY;
    for (int64_t j = 0; j < keys; ++j) {
      if (c.left >= 0 && j < i + shift - c.left) continue;
      if (c.right >= 0 && j > i + shift + c.right) continue;
      double dot = 0;
      for (int64_t x = 0; x < c.qk_size; ++x) dot += get(q_, q + x) * get(k_, k(j) + x);
      if (c.bias == Bias::kPreScale) dot += get(bias_, bias_at(j));
      dot *= scale;
      if (c.bias == Bias::kPostScale) dot += get(bias_, bias_at(j));
      s[static_cast<size_t>(j)] = dot;
      top = std::fmax(top, dot);
    }
    double total = c.sink ? std::exp(sink - top) : 0;
    for (double x : s) total += x == -INFINITY ? 0 : std::exp(x - top);
    aux_[static_cast<size_t>((b * c.heads + h) * c.queries + i)] =
        total == 0 ? -INFINITY : top + std::log(total);
    if (total == 0) return;
    double delta = 0, delta_size = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double& p = s[static_cast<size_t>(j)];
      p = p == -INFINITY ? 0 : std::exp(p - top) / total;
      const double kept = c.dropout > 0 ? (keeps(c, b, h, i, j) ? keep : 0) : 1;
      double& dp = d[static_cast<size_t>(j)];
      for (int64_t x = 0; x < c.v_size; ++x) {
        out_[static_cast<size_t>(o + x)].add(p * kept * get(v_, v(j) + x));
        v_grad_[static_cast<size_t>(v(j) + x)].add(p * kept * get(grad_, o + x));
        dp += kept * get(grad_, o + x) * get(v_, v(j) + x);
        delta_size += std::fabs(p * kept * get(grad_, o + x) * get(v_, v(j) + x));
      }
      delta += p * dp;
    }
    for (int64_t j = 0; j < keys; ++j) {
      const double p = s[static_cast<size_t>(j)];
      const double ds = p * (d[static_cast<size_t>(j)] - delta);
      const double size = p * (std::fabs(d[static_cast<size_t>(j)]) + delta_size);
      for (int64_t x = 0; x < c.qk_size; ++x) {
        Sum& dq = q_grad_[static_cast<size_t>(q + x)];
        Sum& dk = k_grad_[static_cast<size_t>(k(j) + x)];
        dq.value += scale * ds * get(k_, k(j) + x);
        dq.size += std::fabs(scale) * size * (0.3 + std::fabs(get(k_, k(j) + x)));
        dk.value += scale * ds * get(q_, q + x);
        dk.size += std::fabs(scale) * size * (0.3 + std::fabs(get(q_, q + x)));
      }
      if (c.bias != Bias::kNone) {
        const double factor = c.bias == Bias::kPreScale ? scale : 1;
        Sum& db = bias_grad_[static_cast<size_t>(bias_at(j))];
        db.value += factor * ds;
        db.size += std::fabs(factor) * size;
      }
    }
    if (!c.sink) return;
    Sum& ds = sink_grad_[static_cast<size_t>(h)];
    ds.value -= std::exp(sink - top) / total * delta;
    ds.size += std::exp(sink - top) / total * delta_size;
  }

  const Case c_;
  Isa isa_ = Isa::kGeneric;
  Buffer q_, k_, v_, grad_, bias_;
  std::vector<float> sink_;
  std::vector<Sum> out_, q_grad_, k_grad_, v_grad_, bias_grad_, sink_grad_;
  std::vector<double> aux_;
};

TEST(attention_sizes) {
  std::mt19937 random(1);
  Threads pool(2);
  const Parallel two(pool), one;
  const int64_t lengths[] = {0, 1, 5, 31, 33, 65, 130};
  const int64_t sizes[] = {1, 3, 16, 40, 65};
  int64_t i = 0;
  for (int64_t queries : lengths) {
    for (int64_t keys : lengths) {
      for (DType dtype : {DType::F32, DType::BF16, DType::F16}) {
        Case c{dtype, 1 + i % 2, 4, i % 3 == 0 ? 4 : i % 3, queries, keys, sizes[i % 5],
               sizes[(i / 5) % 5]};
        c.right = i % 4 == 0 ? -1 : 0;
        c.bottom_right = i % 4 == 2;
        if (takes_case()) Checker(c, random).run(i % 2 == 0 ? one : two);
        ++i;
      }
    }
  }
  Case wide{DType::F32, 1, 1, 1, 3, 70, 256, 200};
  wide.scale = 0.05f;
  for (DType dtype : {DType::F32, DType::BF16}) {
    wide.dtype = dtype;
    Checker(wide, random).run(one);
  }
}

TEST(attention_options) {
  std::mt19937 random(2);
  Threads pool(2);
  const Parallel two(pool);
  for (int i = 0; i < 96; ++i) {
    Case c{i % 2 == 0 ? DType::F32 : DType::BF16, 2, 4, i % 3 == 0 ? 2 : 4, 70, 90, 24, 17};
    if (i % 5 == 1) c.right = 0;
    if (i % 5 == 2) c.left = 9, c.right = 0;
    if (i % 5 == 3) c.left = 40, c.right = 3;
    if (i % 5 == 4) c.left = 0, c.right = 0;
    c.bottom_right = i % 4 == 1;
    c.bias = static_cast<Bias>(i / 2 % 3);
    c.bias_batches = i % 4 == 0 ? 2 : 1;
    c.bias_heads = i % 3 == 0 ? 4 : 1;
    c.sink = i / 3 % 2 == 1;
    c.dropout = i % 7 == 2 ? 0.4f : 0.0f;
    c.short_ones = i % 8 == 3 || i % 8 == 6;
    if (i % 11 == 4) c.scale = -0.3f;
    if (i % 11 == 5) c.scale = 0;
    if (takes_case()) Checker(c, random).run(two);
  }
}

TEST(attention_long) {
  std::mt19937 random(3);
  Threads pool(2);
  const Parallel two(pool);
  for (DType dtype : {DType::F32, DType::BF16}) {
    Case c{dtype, 1, 2, 1, 300, 333, 20, 33};
    Checker(c, random).run(two);
    c.right = 0;
    Checker(c, random).run(two);
  }
}

#if defined(__x86_64__)

// A product of tiles with a row of `pairs` pairs of bfloat16, and as many pairs in a column.
float tile_product(const std::vector<uint16_t>& left, const std::vector<uint16_t>& right,
                   float start) {
  const auto pairs = static_cast<int64_t>(left.size() / 2);
  TileConfig config;
  config.set(0, 1, 4);
  config.set(1, 1, 4 * pairs);
  config.set(2, pairs, 4);
  tile_configure(config);
  tile_load<0>(&start, 4);
  tile_load<1>(left.data(), 4 * pairs);
  tile_load<2>(right.data(), 4);
  tile_multiply_bf16<0, 1, 2>();
  tile_store<0>(&start, 4);
  tile_release();
  return start;
}

// What the instruction does to the last bit, be it real or emulated.
TEST(attention_tiles) {
#if !defined(JAXTAP_EMULATE_AMX)
  if (!available(Isa::kAmx)) return;
#endif
  const auto bf16 = [](float x) { return f32_to_bf16(x); };
  const uint16_t one = bf16(1), two = bf16(2), tiny = 0x0001, small = bf16(0x1p-24f);
  CHECK(tile_product({two, one}, {bf16(3), two}, 1) == 9);
  // The products of even places are added up without the sum that there was, and apart from those
  // of odd places.
  CHECK(tile_product({one, 0, small, 0}, {one, 0, one, 0}, 0) == 1);
  CHECK(tile_product({small, 0, small, 0}, {one, 0, one, 0}, 1) == 1 + 0x1p-23f);
  CHECK(tile_product({small, small}, {one, one}, 1) == 1 + 0x1p-23f);
  CHECK(tile_product({one, small, 0, small}, {one, one, 0, one}, 0) == 1 + 0x1p-23f);
  // Ties go to even numbers, and products are not rounded.
  CHECK(tile_product({small, 0}, {bf16(3), 0}, 1) == 1 + 0x1p-22f);
  CHECK(tile_product({bf16(1.0078125f), 0}, {bf16(1.0078125f), 0}, 0) == 1.01568603515625f);
  // Subnormal numbers are zeros, in factors, in sums and in results.
  CHECK(tile_product({tiny, 0}, {bf16(0x1p126f), 0}, 0) == 0);
  CHECK(tile_product({bf16(0x1p-100f), 0}, {bf16(0x1p-30f), 0}, 0) == 0);
  CHECK(tile_product({one, 0}, {0, 0}, 0x1p-130f) == 0);
  CHECK(tile_product({bf16(0x1p-126f), 0}, {one, 0}, -0x1.8p-126f) == 0);
  CHECK(std::isinf(tile_product({bf16(0x1p127f), 0}, {two, 0}, 1)));
  const float nan = tile_product({bf16(INFINITY), 0}, {0, 0}, 1);
  CHECK(nan != nan);
}

#endif

TEST(attention_is_the_same_on_any_threads) {
  std::mt19937 random(4);
  Threads pool(2);
  const Parallel two(pool), one;
  const Buffer q = numbers(600 * 32, DType::F32, random), k = numbers(600 * 32, DType::F32, random);
  const Case c{DType::F32, 1, 1, 1, 600, 600, 32, 32};
  std::vector<float> results[2];
  for (int i = 0; i < 2; ++i) {
    std::vector<float> out(600 * 32), aux(600), grads(3 * 600 * 32);
    Problem p;
    p.segments = p.q_heads = p.kv_heads = 1;
    p.segment = segment_of;
    p.context = &c;
    p.most_queries = p.most_keys = 600;
    p.qk_size = p.v_size = 32;
    p.right = 0;
    p.q = {const_cast<uint8_t*>(q.get()), 32, 32};
    p.k = p.v = {const_cast<uint8_t*>(k.get()), 32, 32};
    p.out = {out.data(), 32, 32};
    p.aux = aux.data();
    const Parallel& parallel = i == 0 ? one : two;
    attention::forward(p, parallel);
    Gradients g;
    g.out_grad = p.q;
    g.q_grad = {grads.data(), 32, 32};
    g.k_grad = {grads.data() + 600 * 32, 32, 32};
    g.v_grad = {grads.data() + 2 * 600 * 32, 32, 32};
    attention::backward(p, g, parallel);
    results[i] = out;
    results[i].insert(results[i].end(), grads.begin(), grads.end());
  }
  CHECK(results[0] == results[1]);
}

}  // namespace
