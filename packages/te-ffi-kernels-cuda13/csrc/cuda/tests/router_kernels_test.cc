// The router's CUDA kernels, on threads in software, against the CPU's; and the loss against
// double.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "cuda/kernels/router.h"
#include "cuda/tests/kernels.h"
#include "router/router.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;
using router::MapFormat;
using router::Options;
using router::Score;

struct RouterCase {
  Options options;
  int64_t tokens;
  DType dtype;
  bool with_bias = false;
  std::vector<float> some = {};  // what logits are, if anything

  std::string text() const {
    return std::to_string(tokens) + " x " + std::to_string(options.experts) + ", top " +
           std::to_string(options.topk) + ", score " +
           std::to_string(static_cast<int64_t>(options.score)) +
           (options.pre_softmax ? ", before" : "") + (options.dense ? ", dense" : "") +
           ", groups " + std::to_string(options.group_topk) + " of " +
           std::to_string(options.groups) + ", " + name(dtype) + (with_bias ? ", bias" : "") +
           (options.format == MapFormat::kBits ? ", bits" : "") +
           (some.empty() ? "" : ", some numbers");
  }
};

// Numbers that all dtypes have, so that scores are equal, or not nearly.
Buffer logits_of(const RouterCase& c, std::mt19937& random) {
  const int64_t size = c.tokens * c.options.experts;
  Buffer out(size * bytes_of(c.dtype), bytes_of(c.dtype));
  std::normal_distribution<float> normal(0.0f, 2.0f);
  for (int64_t i = 0; i < size; ++i) {
    const float x = c.some.empty() ? normal(random) : c.some[random() % c.some.size()];
    set_element(out.get(), c.dtype, i, bf16_to_f32(f32_to_bf16(x)));
  }
  return out;
}

struct Routed {
  explicit Routed(const RouterCase& c)
      : probs(c.tokens * c.options.experts * bytes_of(c.dtype), bytes_of(c.dtype)),
        map(c.tokens * router::map_bytes(c.options.format, c.options.experts), 1),
        saved(c.tokens * c.options.experts * 4, 4) {}
  Buffer probs, map, saved;
};

void check_router(const RouterCase& c, std::mt19937& random) {
  if (!takes_case()) return;
  const std::string what = c.text();
  const int64_t experts = c.options.experts, size = c.tokens * experts;
  const Buffer logits = logits_of(c, random);
  const DType bias_dtype = kFloats[random() % 3];
  const Buffer bias = numbers(experts, bias_dtype, false, 0.3f, random);
  std::vector<float> bias_floats;
  for (int64_t i = 0; i < experts; ++i) {
    bias_floats.push_back(static_cast<float>(element(bias.get(), bias_dtype, i)));
  }

  Routed found(c), wanted(c);
  router::Forward cpu;
  cpu.options = c.options;
  cpu.tokens = c.tokens;
  cpu.dtype = te::float_of(c.dtype);
  cpu.logits = logits.get();
  cpu.bias = c.with_bias ? bias_floats.data() : nullptr;
  cpu.probs = wanted.probs.get();
  cpu.map = wanted.map.get();
  cpu.saved = reinterpret_cast<float*>(wanted.saved.get());
  router::forward(cpu, Parallel());
  cuda::RouterForward args;
  args.options = c.options;
  args.tokens = c.tokens;
  args.dtype = cpu.dtype;
  args.logits = logits.get();
  args.bias = c.with_bias ? bias.get() : nullptr;
  args.bias_dtype = te::float_of(bias_dtype);
  args.probs = found.probs.get();
  args.map = found.map.get();
  args.saved = reinterpret_cast<float*>(found.saved.get());
  cuda::router_forward(args, nullptr);
  CHECK_THAT(same(found.map, wanted.map), what + ": map");
  CHECK_THAT(near(found.probs, wanted.probs, c.dtype, size), what + ": probs");
  CHECK_THAT(near(found.saved, wanted.saved, DType::F32, size), what + ": saved");

  const Buffer grad = numbers(size, c.dtype, false, 1.0f, random);
  Buffer out(size * bytes_of(c.dtype), bytes_of(c.dtype)), wanted_out(out.size(), bytes_of(c.dtype));
  router::Backward undo;
  undo.options = c.options;
  undo.tokens = c.tokens;
  undo.dtype = cpu.dtype;
  undo.map = cpu.map;
  undo.saved = cpu.saved;
  undo.grad = grad.get();
  undo.out = wanted_out.get();
  router::backward(undo, Parallel());
  cuda::RouterBackward back;
  back.options = undo.options;
  back.tokens = undo.tokens;
  back.dtype = undo.dtype;
  back.map = c.options.dense ? nullptr : undo.map;
  back.saved = undo.saved;
  back.grad = undo.grad;
  back.out = out.get();
  cuda::router_backward(back, nullptr);
  CHECK_THAT(near(out, wanted_out, c.dtype, size), what + ": gradient");
}

TEST(cuda_router) {
  std::mt19937 random(31);
  for (DType dtype : kFloats) {
    for (Score score : {Score::kSigmoid, Score::kSoftmax, Score::kSqrtSoftplus}) {
      for (int64_t experts : {1, 3, 31, 32, 33, 64, 65, 128, 130, 256, 300, 512, 515}) {
        for (int64_t topk : {1, 2, 8, 33}) {
          if (topk > experts) continue;
          RouterCase c = {{}, experts > 64 ? 3 : 9, dtype};
          c.options.experts = experts;
          c.options.topk = topk;
          c.options.score = score;
          c.options.format = random() % 2 == 0 ? MapFormat::kBits : MapFormat::kBytes;
          c.options.scaling = 1.25f;
          check_router(c, random);
          c.options.pre_softmax = true;
          c.with_bias = score != Score::kSoftmax;
          check_router(c, random);
          c.options.pre_softmax = c.with_bias = false;
          c.options.scaling = 1.0f;
          c.options.dense = true;
          check_router(c, random);
        }
      }
    }
  }
  RouterCase c = {{}, 0, DType::F32};
  c.options.experts = 40;
  check_router(c, random);
}

TEST(cuda_router_of_groups) {
  std::mt19937 random(32);
  for (DType dtype : kFloats) {
    for (Score score : {Score::kSigmoid, Score::kSoftmax, Score::kSqrtSoftplus}) {
      for (auto [experts, groups, chosen, topk] :
           {std::array<int64_t, 4>{32, 4, 2, 4}, {60, 5, 3, 6}, {256, 8, 4, 8}, {24, 24, 6, 6},
            {64, 2, 1, 30}, {66, 33, 33, 66}, {520, 8, 4, 8}, {600, 300, 3, 6}}) {
        RouterCase c = {{}, 6, dtype};
        c.options.experts = experts;
        c.options.groups = groups;
        c.options.group_topk = chosen;
        c.options.topk = topk;
        c.options.score = score;
        c.options.pre_softmax = experts % 60 == 0;
        c.with_bias = score != Score::kSoftmax && random() % 2 == 0;
        check_router(c, random);
      }
    }
  }
}

TEST(cuda_router_among_equals) {
  std::mt19937 random(33);
  for (const std::vector<float>& some :
       {std::vector<float>{0.0f}, {0.0f, -0.0f}, {1.0f, -1.0f, 0.0f},
        {1.0f, -0.0f, 0.0f, kInfinity, -kInfinity}, {1.0f, -kInfinity, kNan, 0.0f}}) {
    for (int64_t experts : {1, 5, 40, 64, 129, 512, 700}) {
      for (int64_t topk : {1, 2, 11, 33}) {
        if (topk > experts) continue;
        RouterCase c = {{}, 4, DType::F32, false, some};
        c.options.experts = experts;
        c.options.topk = topk;
        check_router(c, random);
        // NaN that is computed has the sign that the processor gives it.
        if (std::any_of(some.begin(), some.end(), [](float x) { return std::isnan(x); })) continue;
        for (Score score : {Score::kSigmoid, Score::kSqrtSoftplus}) {
          c.options.score = score;
          check_router(c, random);
        }
      }
    }
  }
}

template <typename T>
Buffer counts_as(const std::vector<float>& counts) {
  Buffer out(static_cast<int64_t>(counts.size() * sizeof(T)), sizeof(T));
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto count = static_cast<T>(counts[i]);
    std::memcpy(out.get() + i * sizeof(T), &count, sizeof(T));
  }
  return out;
}

Buffer counts_as(DType dtype, const std::vector<float>& counts) {
  if (dtype == DType::S64) return counts_as<int64_t>(counts);
  if (dtype == DType::S32) return counts_as<int32_t>(counts);
  if (dtype == DType::S16) return counts_as<int16_t>(counts);
  Buffer out(static_cast<int64_t>(counts.size()) * bytes_of(dtype), bytes_of(dtype));
  for (size_t i = 0; i < counts.size(); ++i) {
    set_element(out.get(), dtype, static_cast<int64_t>(i), counts[i]);
  }
  return out;
}

void check_loss(int64_t batch, int64_t tokens, int64_t experts, DType dtype, std::mt19937& random) {
  if (!takes_case()) return;
  constexpr DType kCounts[] = {DType::S64, DType::S32, DType::S16, DType::F32, DType::BF16};
  const int64_t each = tokens * experts;
  const std::string what = std::to_string(batch) + " of " + std::to_string(tokens) + " x " +
                           std::to_string(experts) + ", " + name(dtype);
  const Buffer probs = numbers(batch * each, dtype, false, 1.0f, random);
  const Buffer grads = numbers(batch, dtype, false, 1.0f, random);
  std::vector<float> counts;
  for (int64_t i = 0; i < batch * experts; ++i) {
    counts.push_back(static_cast<float>(random() % 200));
  }
  cuda::RouterLoss args;
  args.batch = batch;
  args.tokens = tokens;
  args.experts = experts;
  args.dtype = te::float_of(dtype);
  args.counts_dtype = kCounts[random() % 5];
  const Buffer given = counts_as(args.counts_dtype, counts);
  args.counts = given.get();
  Buffer out_numbers(8 * batch, 4), losses(batch * bytes_of(dtype), bytes_of(dtype));
  Buffer out(batch * each * bytes_of(dtype), bytes_of(dtype));
  args.numbers = reinterpret_cast<float*>(out_numbers.get());
  std::vector<double> parts(static_cast<size_t>(batch * cuda::loss_parts(args)));
  const float coefficient = router::coefficient(tokens, experts, 4, 0.01);
  const bool in_parts = random() % 2 == 0 && !parts.empty();
  cuda::router_loss(args, coefficient, probs.get(), in_parts ? parts.data() : nullptr, losses.get(),
                    nullptr);
  cuda::router_loss_gradient(args, grads.get(), out.get(), nullptr);

  Buffer wanted(out.size(), bytes_of(dtype)), rounded(losses.size(), bytes_of(dtype));
  for (int64_t i = 0; i < batch; ++i) {
    double sum = 0, size = 0;
    for (int64_t at = 0; at < each; ++at) {
      const double part = element(probs.get(), dtype, i * each + at) *
                          static_cast<double>(counts[static_cast<size_t>(i * experts + at % experts)]);
      sum += part;
      size += std::fabs(part);
    }
    const double scale = static_cast<double>(coefficient);
    const float loss = args.numbers[2 * i + 1];
    const double off = std::fabs(static_cast<double>(loss) - sum * scale);
    CHECK_THAT(off <= 6e-8 * std::fabs(sum * scale) + 1e-12 * size * scale, what);
    CHECK_THAT(args.numbers[2 * i] == coefficient, what + ": coefficient");
    set_element(rounded.get(), dtype, i, loss);
    router::Loss cpu;
    cpu.tokens = tokens;
    cpu.experts = experts;
    cpu.dtype = args.dtype;
    cpu.coefficient = coefficient;
    router::loss_gradient(cpu, counts.data() + i * experts,
                          static_cast<float>(element(grads.get(), dtype, i)),
                          wanted.get() + i * each * bytes_of(dtype), Parallel());
  }
  CHECK_THAT(same(losses, rounded), what + ": rounded");
  CHECK_THAT(same(out, wanted), what + ": gradient");
}

TEST(cuda_router_loss) {
  std::mt19937 random(34);
  for (DType dtype : kFloats) {
    for (int64_t tokens : {0, 1, 5, 129, 1000}) {
      for (int64_t experts : {1, 7, 33, 256, 300}) {
        check_loss(random() % 2 == 0 ? 1 : 3, tokens, experts, dtype, random);
      }
    }
    check_loss(0, 5, 8, dtype, random);
    check_loss(2, 5, 0, dtype, random);
  }
}

}  // namespace

#endif
