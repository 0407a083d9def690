// What a mixture of experts takes on CUDA, on threads in software, against the CPU's: permutation
// of tokens and the largest numbers of rows.
#include <string>
#include <vector>

#include "cuda/kernels/permutation.h"
#include "cuda/kernels/topk.h"
#include "cuda/tests/kernels.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

struct Tokens {
  int64_t tokens, experts, cols;
  DType dtype, probs;
  bool padded, wide;
  int64_t rows = 0;

  std::string text() const {
    return std::to_string(tokens) + " x " + std::to_string(cols) + ", " +
           std::to_string(experts) + " experts, " + std::to_string(rows) + " rows, " +
           name(dtype) + " and " + name(probs) + (padded ? ", padded" : "") +
           (wide ? ", aligned" : "");
  }
};

void clear(Buffer& buffer) { std::memset(buffer.get(), 0, static_cast<size_t>(buffer.size())); }

void check_tokens(Tokens c, std::mt19937& random) {
  if (!takes_case()) return;
  const int64_t width = 2 * c.experts + 1;
  Buffer routed(c.tokens * c.experts, 1);
  int64_t all = 0;
  for (int64_t i = 0; i < routed.size(); ++i) all += routed.get()[i] = random() % 3 == 0;
  Buffer map(4 * c.tokens * width, 4), same_map(map.size(), 4);
  std::vector<int32_t> counts(static_cast<size_t>(c.experts)), same_counts = counts;
  permutation::MakeRowMap make;
  make.routed = routed.get();
  make.tokens = c.tokens;
  make.experts = c.experts;
  make.entries = reinterpret_cast<int32_t*>(map.get());
  make.counts = counts.data();
  cuda::make_row_map(make, nullptr);
  make.entries = reinterpret_cast<int32_t*>(same_map.get());
  make.counts = same_counts.data();
  permutation::make_row_map(make, Parallel());
  CHECK_THAT(same(map, same_map) && counts == same_counts, c.text() + ": map");

  std::vector<int32_t> offsets;
  int32_t padding = 0;
  for (int32_t count : counts) {
    offsets.push_back(padding);
    padding += (4 - count % 4) % 4;
  }
  offsets.shrink_to_fit();
  // Some rows too few, or some too many.
  c.rows = std::max<int64_t>(0, all + (c.padded ? padding : 0) + static_cast<int64_t>(random() % 7) - 2);
  const std::string what = c.text();
  permutation::RowMap of;
  of.entries = make.entries;
  of.pad_offsets = c.padded ? offsets.data() : nullptr;
  of.tokens = c.tokens;
  of.experts = c.experts;
  of.rows = c.rows;
  const int64_t one = bytes_of(c.dtype), prob = bytes_of(c.probs), places = c.tokens * c.experts;
  const Buffer x = numbers(c.tokens * c.cols, c.dtype, c.wide, 1.0f, random);
  const Buffer probs = numbers(places, c.probs, c.wide, 1.0f, random);

  Buffer rows(c.rows * c.cols * one, misalign(c.dtype, c.wide)), wanted_rows(rows.size(), 0);
  Buffer moved(c.rows * prob, misalign(c.probs, c.wide)), wanted_moved(moved.size(), 0);
  permutation::Permute permute;
  permute.map = of;
  permute.x = x.get();
  permute.row_bytes = c.cols * one;
  permute.probs = probs.get();
  permute.prob_bytes = prob;
  for (Buffer* buffer : {&rows, &moved}) clear(*buffer);
  permute.out = rows.get();
  permute.permuted_probs = moved.get();
  cuda::permute(permute, nullptr);
  permute.out = wanted_rows.get();
  permute.permuted_probs = wanted_moved.get();
  permutation::permute(permute, Parallel());
  CHECK_THAT(same(rows, wanted_rows) && same(moved, wanted_moved), what + ": rows");

  std::vector<float> factors;
  for (int64_t i = 0; i < places; ++i) {
    factors.push_back(static_cast<float>(element(probs.get(), c.probs, i)));
  }
  const Buffer made = numbers(c.rows * c.cols, c.dtype, c.wide, 1.0f, random);
  for (bool weighted : {false, true}) {
    Buffer sums(c.tokens * c.cols * one, misalign(c.dtype, c.wide)), wanted_sums(sums.size(), 0);
    Buffer back(places * prob, misalign(c.probs, c.wide)), wanted_back(back.size(), 0);
    cuda::Unpermute args;
    args.map = of;
    args.x = made.get();
    args.dtype = te::float_of(c.dtype);
    args.cols = c.cols;
    args.permuted_probs = moved.get();
    args.prob_bytes = prob;
    clear(back);
    args.out = sums.get();
    args.probs = back.get();
    args.given_factors = weighted ? probs.get() : nullptr;
    args.factors_dtype = te::float_of(c.probs);
    cuda::unpermute(args, nullptr);
    permutation::Unpermute cpu = args;
    cpu.factors = weighted ? factors.data() : nullptr;
    cpu.out = wanted_sums.get();
    cpu.probs = wanted_back.get();
    permutation::unpermute(cpu, Parallel());
    CHECK_THAT(same(sums, wanted_sums), what + ": sums");
    CHECK_THAT(c.rows == 0 || same(back, wanted_back), what + ": probabilities");
  }

  const Buffer grad = numbers(c.tokens * c.cols, c.dtype, c.wide, 1.0f, random);
  Buffer slopes(made.size(), misalign(c.dtype, c.wide)), wanted_slopes(made.size(), 0);
  Buffer of_probs(places * prob, misalign(c.probs, c.wide)), wanted_probs(of_probs.size(), 0);
  cuda::UnpermuteGradient args;
  args.map = of;
  args.grad = grad.get();
  args.x = made.get();
  args.dtype = te::float_of(c.dtype);
  args.cols = c.cols;
  for (Buffer* buffer : {&slopes, &of_probs}) clear(*buffer);
  args.x_grad = slopes.get();
  args.given_factors = probs.get();
  args.factors_dtype = te::float_of(c.probs);
  args.given_factors_grad = of_probs.get();
  cuda::unpermute_gradient(args, nullptr);
  permutation::UnpermuteGradient cpu = args;
  std::vector<float> found(static_cast<size_t>(places));
  cpu.factors = factors.data();
  cpu.x_grad = wanted_slopes.get();
  cpu.factors_grad = found.data();
  permutation::unpermute_gradient(cpu, Parallel());
  for (int64_t i = 0; i < places; ++i) {
    set_element(wanted_probs.get(), c.probs, i, found[static_cast<size_t>(i)]);
  }
  CHECK_THAT(same(slopes, wanted_slopes), what + ": gradient of rows");
  bool good = true;
  for (int64_t i = 0; i < places; ++i) {
    const double a = element(of_probs.get(), c.probs, i), b = element(wanted_probs.get(), c.probs, i);
    good = good && std::fabs(a - b) <= 1e-2 * std::fabs(b) + 1e-4;
  }
  CHECK_THAT(good, what + ": gradient of probabilities");
}

TEST(cuda_permutation) {
  std::mt19937 random(51);
  for (DType dtype : kFloats) {
    for (DType probs : kFloats) {
      for (int64_t tokens : {0, 1, 37, 300}) {
        for (int64_t experts : {1, 5, 33}) {
          if (tokens * experts > 2000) continue;
          const int64_t cols = random() % 2 == 0 ? 24 : static_cast<int64_t>(1 + random() % 1100);
          check_tokens({tokens, experts, cols, dtype, probs, random() % 2 == 0, random() % 2 == 0},
                       random);
        }
      }
    }
  }
  check_tokens({3, 300, 8, DType::BF16, DType::F32, true, true}, random);
}

void check_topk(int64_t rows, int64_t cols, int64_t k, DType dtype, bool few, std::mt19937& random) {
  const std::string what = std::to_string(k) + " of " + std::to_string(rows) + " x " +
                           std::to_string(cols) + ", " + name(dtype);
  Buffer keys = numbers(rows * cols, dtype, false, 1.0f, random);
  if (few) {
    const float some[] = {0.0f, -0.0f, 1.0f, kInfinity, -kInfinity, kNan, -1.0f};
    for (int64_t i = 0; i < rows * cols; ++i) set_element(keys.get(), dtype, i, some[random() % 7]);
  }
  Buffer values(rows * k * bytes_of(dtype), bytes_of(dtype)), wanted_values(values.size(), 0);
  Buffer indices(rows * k * 4, 4), wanted_indices(indices.size(), 4);
  router::TopK args;
  args.keys = keys.get();
  args.dtype = te::float_of(dtype);
  args.rows = rows;
  args.cols = cols;
  args.k = k;
  args.values = values.get();
  args.indices = reinterpret_cast<int32_t*>(indices.get());
  cuda::topk(args, nullptr);
  args.values = wanted_values.get();
  args.indices = reinterpret_cast<int32_t*>(wanted_indices.get());
  router::topk(args, Parallel());
  CHECK_THAT(same(values, wanted_values), what + ": values");
  CHECK_THAT(same(indices, wanted_indices), what + ": indices");
}

TEST(cuda_topk) {
  std::mt19937 random(52);
  for (DType dtype : kFloats) {
    for (bool few : {false, true}) {
      for (int64_t cols : {1, 8, 255, 256, 257, 1500}) {
        for (int64_t k : {1, 2, 8, 100, 1024}) {
          if (k <= cols && takes_case()) check_topk(random() % 3, cols, k, dtype, few, random);
        }
        check_topk(1, cols, std::min<int64_t>(cols, 1024), dtype, few, random);
      }
    }
  }
  CHECK(throws<Error>([&] { check_topk(1, 2000, 1025, DType::F32, false, random); },
                      "must be at most 1024"));
}

}  // namespace

#endif
