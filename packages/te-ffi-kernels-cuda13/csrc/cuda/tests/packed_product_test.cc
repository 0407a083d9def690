// Products with packed weights, and packing, on threads in software, against the CPU's.
#include <cmath>
#include <random>
#include <string>

#include "cuda/kernels/packed.h"
#include "cuda/tests/packed_run.h"
#include "tests/check.h"

#if !defined(__SANITIZE_THREAD__)  // it doesn't know of the threads in software

namespace {

using namespace jaxtap;
using namespace jaxtap::testing;

// Of 8 bits, and of 4 with scales of 32 and of 16.
constexpr struct Kind {
  int bits, scale_bits;
} kKinds[] = {{8, 32}, {4, 32}, {4, 16}};

TEST(cuda_pack_writes_the_bytes_of_the_cpu) {
  std::mt19937 random(21);
  for (const auto& [bits, scale_bits] : kKinds) {
    for (int64_t n : {0, 1, 16, 35}) {
      for (const auto& [k, group] : {std::pair<int64_t, int64_t>{1, 0}, {30, 0}, {64, 0}, {257, 0},
                                     {16, 8}, {192, 24}, {192, 64}}) {
        const PanelLayout layout = panel_layout(k, group, bits, scale_bits);
        Weights weights = random_weights(n, layout, random);
        if (n > 1) {
          weights.scales[1] = kNan;
          weights.scales[0] = -0.0f;
          weights.pack_again();
        }
        Buffer found(weights.buffer.size(), 0);
        const std::vector<uint8_t> scales = weights.scale_bytes();
        cuda::packed_pack({weights.codes.data(), scales.data(), layout, n, found.get()}, nullptr);
        CHECK_THAT(same(found, weights.buffer),
                   std::to_string(k) + " x " + std::to_string(n) + ", group " +
                       std::to_string(group) + ", " + std::to_string(bits) +
                       " bits with scales of " + std::to_string(scale_bits));
      }
    }
  }
}

TEST(cuda_pack_wraps_around_beyond_4_bits) {
  const int8_t codes[8] = {8, -9, 127, -128, 7, -8, 0, 1}, wrapped[8] = {-8, 7, -1, 0, 7, -8, 0, 1};
  const float scale = 1.0f;
  const PanelLayout layout = panel_layout(8, 0, 4);
  Buffer found(layout.panel_bytes(), 0), wanted(layout.panel_bytes(), 0);
  cuda::packed_pack({codes, &scale, layout, 1, found.get()}, nullptr);
  pack(wrapped, &scale, 1, layout, wanted.get(), 1, layout.panel_bytes(), Parallel());
  CHECK(same(found, wanted));
}

void check_codes(PackedRun& run) {
  run.on_device();
  CHECK_THAT(run.sound && same(run.found, run.on_cpu()), run.text());
}

// The sizes and layouts at which ways part: one row, a few, and many.
constexpr int64_t kRows[] = {0, 1, 3, 6, 64, 65, 131};

TEST(cuda_products_of_codes_have_the_bits_of_the_cpu) {
  std::mt19937 random(22);
  for (int64_t m : kRows) {
    for (int64_t n : {0, 1, 16, 32, 35, 70}) {
      for (const auto& [k, group] : {std::pair<int64_t, int64_t>{1, 0}, {30, 0}, {64, 0}, {600, 0},
                                     {16, 8}, {192, 24}, {192, 64}, {320, 160}}) {
        const int in = static_cast<int>(random() % 3), out = static_cast<int>(random() % 3);
        PackedRun run({m, k, n, group, 8, true, in, out}, random);
        check_codes(run);
        CHECK_THAT(run.multiplied == (m > 64 && n != 0 && group == 0), run.text());
      }
    }
  }
}

TEST(cuda_products_of_codes_have_any_number_of_rows) {
  std::mt19937 random(29);
  for (int64_t m : {65, 77, 95, 96, 97, 128, 129}) {
    for (int64_t n : {16, 20}) {
      for (int out = 0; out < 3; ++out) {
        PackedRun run({m, 48, n, 0, 8, true, out, out}, random);
        check_codes(run);
        CHECK_THAT(run.multiplied == 1, run.text());
      }
    }
  }
}

// As many columns at a time as there is memory for have the bits of all at once.
TEST(cuda_products_in_chunks_of_columns) {
  std::mt19937 random(30);
  for (const auto& [bits, scale_bits] : kKinds) {
    for (bool quantizes : {false, true}) {
      for (int64_t group : {0, 32}) {
        if (quantizes && (bits == 4 || group != 0)) continue;
        for (int64_t n : {16, 70, 160}) {
          for (int kind = 0; kind < 3; ++kind) {
            // Sums in the result, and apart from it; rows that are padded.
            const int64_t m = kind == 0 ? 96 : 67;
            PackedRun run({m, 64, n, group, bits, quantizes, kind, kind, scale_bits}, random);
            run.on_device();
            const int parts = run.multiplied;
            Buffer whole(run.found.size(), 0);
            std::memcpy(whole.get(), run.found.get(), static_cast<size_t>(whole.size()));
            const int64_t cols = run.weights.layout.columns();
            const int64_t weight = quantizes ? 1 : kind == 0 ? 4 : 2 * parts;
            for (int64_t panels : {1, 2}) {
              run.args.most = static_cast<size_t>(panels * cols * weight * 64);
              spoil_all(run.found);
              run.on_device();
              const cuda::PackedSteps steps(run.args);
              const int64_t chunks = (steps.cols + panels * cols - 1) / (panels * cols);
              CHECK_THAT(run.sound && same(run.found, whole), run.text());
              CHECK_THAT(run.multiplied == parts * chunks, run.text());
              CHECK_THAT(steps.chunk % cols == 0 && steps.chunk <= panels * cols, run.text());
            }
          }
        }
      }
    }
  }
}

TEST(cuda_products_of_codes_of_long_rows_and_groups) {
  std::mt19937 random(23);
  for (const auto& [k, group] : {std::pair<int64_t, int64_t>{2000, 0}, {4096, 2048}}) {
    for (int64_t m : {1, 3}) {
      for (int in = 0; in < 3; ++in) {
        PackedRun run({m, k, 20, group, 8, true, in, 0}, random);
        check_codes(run);
      }
    }
  }
}

TEST(cuda_products_of_codes_at_the_ends_of_float32) {
  std::mt19937 random(24);
  for (int64_t m : {2, 66}) {
    for (int64_t group : {0, 32}) {
      for (float size : {1e-37f, 1e-20f, 3e37f}) {
        PackedRun run({m, 64, 17, group, 8, true, 0, 0}, random);
        for (int64_t i = 0; i < m * 64; ++i) {
          set_element(run.x.get(), DType::F32, i, size * static_cast<float>(i % 9 - 4));
        }
        for (int64_t i = 0; i < 64; ++i) set_element(run.x.get(), DType::F32, i, 0.0f);
        check_codes(run);
      }
    }
  }
}

TEST(cuda_products_of_rows_that_are_not_finite) {
  std::mt19937 random(25);
  for (bool quantizes : {true, false}) {
    for (int64_t m : {3, 70}) {
      for (int64_t group : {0, 32}) {
        for (float bad : {kNan, kInfinity, -kInfinity}) {
          PackedRun run({m, 64, 20, group, 8, quantizes, 1, 0}, random);
          run.on_device();
          Buffer before(run.found.size(), 0);
          std::memcpy(before.get(), run.found.get(), static_cast<size_t>(before.size()));
          set_element(run.x.get(), DType::BF16, 64 + 63, bad);
          run.on_device();
          bool good = run.sound;
          for (int64_t i = 0; i < m * 20; ++i) {
            const bool mine = i / 20 == 1;
            good = good && (mine ? !std::isfinite(run.at(i))
                                 : run.at(i) == element(before.get(), DType::F32, i));
            if (mine && (!quantizes || std::isnan(bad))) good = good && std::isnan(run.at(i));
          }
          CHECK_THAT(good, run.text());
        }
      }
    }
  }
}

TEST(cuda_products_with_a_damaged_header) {
  std::mt19937 random(26);
  for (bool quantizes : {true, false}) {
    for (int64_t m : {3, 70}) {
      for (int64_t group : {0, 32}) {
        for (int64_t byte : {0, 4, 5, 6, 7, 8, 12, 17, 24}) {
          PackedRun run({m, 64, 35, group, quantizes ? 8 : 4, quantizes, 0, 0}, random);
          const int64_t cols = run.weights.layout.columns();
          run.weights.buffer.get()[run.weights.packed().panel_bytes + byte] ^= 1;
          run.on_device();
          bool good = true;
          for (int64_t i = 0; i < m * 35; ++i) {
            good = good && std::isnan(run.at(i)) == (i % 35 / cols == 1);
          }
          CHECK_THAT(good, run.text());
        }
      }
    }
  }
}

// Against sums in float64. Weights in two parts of 16 bits have 16 digits at least.
void check_floats(PackedRun& run) {
  run.on_device();
  const PackedCase& c = run.given;
  const double step = c.out == 0 ? 1e-6 : c.out == 1 ? 8e-3 : 1e-3;
  const double part = c.group == 0 || c.in == 0 ? 4e-7 : c.in == 1 ? 0x1p-17 : 1e-6;
  bool good = run.sound;
  for (int64_t i = 0; i < c.m * c.n; ++i) {
    const int64_t row = i / c.n, col = i % c.n;
    double sum = 0, size = 0;
    for (int64_t j = 0; j < c.k; ++j) {
      const double one = element(run.x.get(), kFloats[c.in], row * c.k + j) *
                         run.weights.code(j, col) *
                         static_cast<double>(run.weights.scale(j, col));
      sum += one;
      size += std::fabs(one);
    }
    // Half the least number of float16.
    const double least = c.out == 2 ? 0x1p-25 : 0;
    good = good && std::fabs(run.at(i) - sum) <= step * std::fabs(sum) + part * size + least;
  }
  CHECK_THAT(good, run.text());
  const bool two = c.group != 0 && c.in != 0;
  CHECK_THAT(run.multiplied == (c.m > 64 && c.n != 0 ? 1 + two : 0), run.text());
}

TEST(cuda_products_of_floats_with_many_rows) {
  std::mt19937 random(27);
  for (const auto& [bits, scale_bits] : kKinds) {
    for (int in = 0; in < 3; ++in) {
      for (int out = 0; out < 3; ++out) {
        for (int64_t n : {0, 1, 16, 35}) {
          for (const auto& [k, group] : {std::pair<int64_t, int64_t>{1, 0}, {30, 0}, {64, 0},
                                         {257, 0}, {16, 8}, {192, 24}, {192, 64}}) {
            PackedRun run({65 + static_cast<int64_t>(random() % 9), k, n, group, bits, false, in,
                           out, scale_bits},
                          random);
            check_floats(run);
          }
        }
      }
    }
  }
}

// Scales that float16 doesn't have, and groups that are small beside others of their column.
TEST(cuda_products_of_floats_with_scales_of_many_sizes) {
  std::mt19937 random(28);
  for (int in = 0; in < 3; ++in) {
    for (float size : {1e-30f, 1e-9f, 1.0f, 1e9f, 1e30f}) {
      PackedRun run({66, 96, 20, 32, 8, false, in, 0}, random);
      Weights& w = run.weights;
      for (size_t i = 0; i < w.scales.size(); ++i) {
        w.scales[i] *= size * (i % 7 == 0 ? 1e-4f : i % 5 == 0 ? -1.0f : 1.0f);
      }
      for (size_t g = 0; g < 3; ++g) w.scales[g * 20 + 3] = 0.0f;
      w.pack_again();
      check_floats(run);
    }
  }
}

}  // namespace

#endif
