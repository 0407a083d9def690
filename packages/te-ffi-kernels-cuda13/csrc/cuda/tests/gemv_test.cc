// Products of a few rows with packed weights, on threads in software, against the CPU's.
#include "cuda/kernels/gemv.h"

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/weights.h"

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of the threads in software

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

constexpr DType kFloats[] = {DType::F32, DType::BF16, DType::F16};

struct Run {
  Run(int64_t m, int64_t n, const PanelLayout& layout, int in, int out, std::mt19937& random)
      : weights(random_weights(n, layout, random)),
        k(layout.k),
        x(m * k * size_of(in), size_of(in)),
        found(m * n * size_of(out), size_of(out)),
        rows(m),
        in(in),
        out(out) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (int64_t i = 0; i < m * k; ++i) set_element(x.get(), kFloats[in], i, normal(random));
  }

  static int64_t size_of(int dtype) { return static_cast<int64_t>(byte_size(kFloats[dtype])); }

  void on_device() {
    cuda::Gemv args;
    args.x = x.get();
    args.x_dtype = static_cast<te::Float>(in);
    args.m = rows;
    args.n = weights.n;
    args.layout = weights.layout;
    args.weight = weights.buffer.get();
    args.y = found.get();
    args.y_dtype = static_cast<te::Float>(out);
    cuda::gemv(args, nullptr);
  }

  Buffer on_cpu() const {
    Buffer wanted(found.size(), 0);
    Matmul args;
    args.x = x.get();
    args.x_dtype = kFloats[in];
    args.m = rows;
    args.weights = weights.packed();
    args.y = wanted.get();
    args.y_dtype = kFloats[out];
    matmul(args, Parallel(), Isa::kGeneric);
    return wanted;
  }

  double at(int64_t index) const { return element(found.get(), kFloats[out], index); }

  std::string text() const {
    return std::to_string(rows) + " x " + std::to_string(weights.k) + " x " +
           std::to_string(weights.n) + ", group " + std::to_string(weights.group) + ", " +
           std::to_string(weights.bits) + " bits with scales of " +
           std::to_string(weights.layout.scale_bits) + ", " + name(kFloats[in]) + " to " +
           name(kFloats[out]);
  }

  Weights weights;
  const int64_t k;
  Buffer x, found;
  int64_t rows;
  int in, out;
};

void check(Run& run) {
  run.on_device();
  const Buffer wanted = run.on_cpu();
  const double step = run.out == 0 ? 1e-5 : run.out == 1 ? 8e-3 : 1e-3;
  const double least = run.out == 2 ? 0x1p-25 : 0;  // half the least number of float16
  bool good = true;
  for (int64_t i = 0; i < run.rows * run.weights.n; ++i) {
    const int64_t row = i / run.weights.n, col = i % run.weights.n;
    double sum = 0, size = 0;
    for (int64_t j = 0; j < run.weights.k; ++j) {
      const double part = element(run.x.get(), kFloats[run.in], row * run.weights.k + j) *
                          run.weights.code(j, col) * static_cast<double>(run.weights.scale(j, col));
      sum += part;
      size += std::fabs(part);
    }
    good = good && std::fabs(run.at(i) - sum) <= step * std::fabs(sum) + 1e-6 * size + least;
    // The CPU takes x in fixed point, with 15 bits at least.
    const double other = element(wanted.get(), kFloats[run.out], i);
    good = good &&
           std::fabs(run.at(i) - other) <= 2 * step * std::fabs(sum) + 2e-4 * size + 2 * least;
  }
  CHECK_THAT(good, run.text());
}

// Of 8 bits, and of 4 with scales of 32 and of 16.
constexpr struct Kind {
  int bits, scale_bits;
} kKinds[] = {{8, 32}, {4, 32}, {4, 16}};

TEST(cuda_gemv) {
  std::mt19937 random(13);
  for (const auto& [bits, scale_bits] : kKinds) {
    for (int in = 0; in < 3; ++in) {
      for (int64_t m : {0, 1, 3, 5}) {
        for (int64_t n : {0, 1, 16, 35, 70}) {
          for (const auto& [k, group] : {std::pair<int64_t, int64_t>{1, 0}, {30, 0}, {64, 0},
                                         {257, 0}, {600, 0}, {192, 8}, {192, 24}, {192, 64}}) {
            Run run(m, n, panel_layout(k, group, bits, scale_bits), in,
                    static_cast<int>(random() % 3), random);
            check(run);
          }
        }
      }
    }
  }
}

TEST(cuda_gemv_of_rows_that_are_not_finite) {
  std::mt19937 random(14);
  for (float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    Run run(3, 20, panel_layout(70, 0, 8), 0, 0, random);
    set_element(run.x.get(), DType::F32, 70 + 69, bad);
    run.on_device();
    for (int64_t i = 0; i < 60; ++i) CHECK(std::isnan(run.at(i)) == (i / 20 == 1));
  }
}

TEST(cuda_gemv_of_another_weight) {
  std::mt19937 random(15);
  // Words of the header: magic, kind, k, group, a sum of the payload, the sum of all.
  for (int64_t byte : {0, 4, 5, 6, 7, 8, 12, 17, 24}) {
    for (const auto& [bits, scale_bits] : kKinds) {
      Run run(2, 70, panel_layout(64, 0, bits, scale_bits), 1, 0, random);
      const int64_t panel = run.weights.packed().panel_bytes, cols = run.weights.layout.columns();
      run.weights.buffer.get()[panel + byte] ^= 1;
      run.on_device();
      for (int64_t i = 0; i < 140; ++i) CHECK(std::isnan(run.at(i)) == (i % 70 / cols == 1));
    }
  }
}

}  // namespace

#endif
