// Matmuls with packed weights, and packing, on threads in software: sums against float64, bytes
// against the CPU's.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <vector>

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
        cuda::packed_pack({weights.qvalues.data(), scales.data(), layout, n, found.get()}, nullptr);
        CHECK_THAT(same(found, weights.buffer),
                   std::to_string(k) + " x " + std::to_string(n) + ", group " +
                       std::to_string(group) + ", " + std::to_string(bits) +
                       " bits with scales of " + std::to_string(scale_bits));
      }
    }
  }
}

TEST(cuda_pack_wraps_around_beyond_4_bits) {
  const std::vector<int8_t> qvalues = {8, -9, 127, -128, 7, -8, 0, 1};
  const std::vector<int8_t> wrapped = {-8, 7, -1, 0, 7, -8, 0, 1};
  const std::vector<float> scale = {1.0f};
  const PanelLayout layout = panel_layout(8, 0, 4);
  Buffer found(layout.panel_bytes(), 0), wanted(layout.panel_bytes(), 0);
  cuda::packed_pack({qvalues.data(), scale.data(), layout, 1, found.get()}, nullptr);
  pack(wrapped.data(), scale.data(), 1, layout, wanted.get(), 1, layout.panel_bytes(), Parallel());
  CHECK(same(found, wanted));
}

// Whether a number is that of the CPU, but for the bits of NaN, which a GPU has others of.
bool is_alike(double found, double wanted) {
  if (std::isnan(found) || std::isnan(wanted)) return std::isnan(found) && std::isnan(wanted);
  return found == wanted && std::signbit(found) == std::signbit(wanted);
}

// Against sums in float64; of int8 also with the bits of the CPU, where sums of groups are added up
// in its order.
void check_values(PackedRun& run) {
  if (!takes_case()) return;
  run.on_device();
  const PackedCase& c = run.given;
  const cuda::PackedWorkspace steps(run.args);
  const bool same_bits = c.quantizes && (c.group == 0 || (c.m > 128 && !steps.rounds));
  const Buffer cpu = run.on_cpu();
  const double step = c.out == 0 ? 1e-6 : c.out == 1 ? 8e-3 : 1e-3;
  // Of each product: both factors are rounded to 16 bits, or the weight alone.
  const double rounding = c.in == 2 ? 0x1p-11 : 0x1p-8;
  const double of_product = steps.rounds ? (c.quantizes ? 2 : 1) * rounding + 1e-6 : 1e-6;
  // Half the least number of float16; of float32 the sum of each group may be subnormal, which GPUs
  // take for zero.
  const double groups = c.group == 0 ? 1 : static_cast<double>(c.k / c.group);
  const double least = c.out == 2 ? 0x1p-25 : groups * 0x1p-126;
  bool good = run.sound;
  for (int64_t row = 0; row < c.m; ++row) {
    const std::vector<double> x = run.row_of_x(row);
    for (int64_t col = 0; col < c.n; ++col) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < c.k; ++j) {
        const double one = x[static_cast<size_t>(j)] * run.weights.qvalue(j, col) *
                           static_cast<double>(run.weights.scale(j, col));
        sum += one;
        size += std::fabs(one);
      }
      const int64_t i = row * c.n + col;
      // Beyond the dtype there are infinities, and differences of them: as on the CPU.
      const double of_cpu = element(cpu.get(), kFloats[c.out], i);
      if (c.quantizes && !std::isfinite(of_cpu)) sum = of_cpu;
      const double most = step * std::fabs(sum) + of_product * size + least;
      good = good && (!same_bits || is_alike(run.at(i), of_cpu)) &&
             (run.at(i) == sum || is_alike(run.at(i), sum) || std::fabs(run.at(i) - sum) <= most);
    }
  }
  CHECK_THAT(good, run.text());
  const bool library = c.m > 16 && c.n != 0 && (c.quantizes || c.in != 0);
  CHECK_THAT(run.multiplied == library, run.text());
}

// Sizes at which ways part: rows of a tile, of a block, and of each kernel; columns of a panel and
// of a tile; steps of 32 rows of the weight, eight of them at a time, and parts of warps.
constexpr int64_t kRows[] = {0, 1, 3, 8, 9, 16, 17, 33, 128, 129};
constexpr int64_t kColumns[] = {0, 1, 16, 32, 35, 70, 130};
constexpr std::pair<int64_t, int64_t> kDepths[] = {{1, 0},   {30, 0},   {64, 0},   {257, 0},
                                                   {600, 0}, {32, 32},  {192, 96}, {192, 64},
                                                   {320, 160}, {576, 32}};

// All rows with all depths. Dtypes take turns, so that all rows and all depths have each of them.
TEST(cuda_matmuls_with_packed_weights) {
  std::mt19937 random(22);
  int turn = 0;
  for (bool quantizes : {false, true}) {
    for (int bits : {8, 4}) {
      for (int64_t m : kRows) {
        for (const auto& [k, group] : kDepths) {
          ++turn;
          const int64_t n = kColumns[random() % std::size(kColumns)];
          const int in = turn % 3, out = static_cast<int>(random() % 3);
          const int scale_bits = bits == 4 && turn % 2 == 0 ? 16 : 32;
          PackedRun run({m, k, n, group, bits, quantizes, in, out, scale_bits}, random);
          check_values(run);
        }
      }
    }
  }
}

TEST(cuda_matmuls_with_few_rows_have_any_number_of_columns) {
  std::mt19937 random(23);
  for (int64_t n : kColumns) {
    for (int64_t m : {1, 8}) {
      for (const auto& [bits, scale_bits] : kKinds) {
        for (bool quantizes : {false, true}) {
          for (int64_t group : {0, 128}) {
            PackedRun run({m, 640, n, group, bits, quantizes, static_cast<int>(random() % 3), 0,
                           scale_bits},
                          random);
            check_values(run);
          }
        }
      }
    }
  }
}

TEST(cuda_matmuls_by_cublaslt) {
  std::mt19937 random(29);
  for (int64_t m : {17, 288, 289}) {
    for (const auto& [bits, scale_bits] : kKinds) {
      for (bool quantizes : {false, true}) {
        for (int kind = 0; kind < 3; ++kind) {
          PackedRun run({m, 33 + static_cast<int64_t>(random() % 40),
                         kColumns[random() % std::size(kColumns)], 0, bits, quantizes, kind, kind,
                         scale_bits},
                        random);
          check_values(run);
        }
      }
    }
  }
}

// Each dtype to each, and columns of whole panels, whose sums are results, and others.
TEST(cuda_matmuls_with_groups_by_cublaslt) {
  std::mt19937 random(34);
  for (int64_t n : {64, 35}) {
    for (const auto& [bits, scale_bits] : kKinds) {
      for (bool quantizes : {false, true}) {
        for (int in = quantizes ? 0 : 1; in < 3; ++in) {
          for (int out = 0; out < 3; ++out) {
            PackedRun run({33, 192, n, out == 1 ? 32 : 96, bits, quantizes, in, out, scale_bits},
                          random);
            check_values(run);
          }
        }
      }
    }
  }
}

// As many columns at a time as there is memory for have the bits of all at once.
TEST(cuda_matmuls_in_chunks_of_columns) {
  std::mt19937 random(30);
  for (const auto& [bits, scale_bits] : kKinds) {
    for (bool quantizes : {false, true}) {
      for (int64_t n : {16, 70, 160}) {
        for (int kind = quantizes ? 0 : 1; kind < 3; ++kind) {
          if (!takes_case()) continue;
          // Sums in the result, and apart from it; rows that are padded; groups.
          const int64_t m = kind == 0 ? 288 : 67, group = n == 160 ? 32 : 0;
          PackedRun run({m, 64, n, group, bits, quantizes, kind, kind, scale_bits}, random);
          run.on_device();
          CHECK_THAT(run.multiplied == 1, run.text());
          Buffer whole(run.found.size(), 0);
          std::memcpy(whole.get(), run.found.get(), static_cast<size_t>(whole.size()));
          const int64_t cols = run.weights.layout.columns();
          const int64_t weight = quantizes && group == 0 ? 1 : 2;
          for (int64_t panels : {1, 2}) {
            run.args.most = static_cast<size_t>(panels * cols * weight * 64);
            fill_nan(run.found);
            run.on_device();
            const cuda::PackedWorkspace steps(run.args);
            const int64_t chunks = (steps.cols + panels * cols - 1) / (panels * cols);
            CHECK_THAT(run.sound && same(run.found, whole), run.text());
            CHECK_THAT(run.multiplied == chunks, run.text());
            CHECK_THAT(steps.chunk % cols == 0 && steps.chunk <= panels * cols, run.text());
          }
        }
      }
    }
  }
}

TEST(cuda_matmuls_of_long_rows_and_groups) {
  std::mt19937 random(23);
  for (const auto& [k, group] : {std::pair<int64_t, int64_t>{2000, 0}, {4096, 2048}}) {
    for (int64_t m : {1, 3}) {
      for (int in = 0; in < 3; ++in) {
        for (int bits : {8, 4}) {
          for (bool quantizes : {false, true}) {
            PackedRun run({m, k, 20, group, bits, quantizes, in, 0}, random);
            check_values(run);
          }
        }
      }
    }
  }
}

// All quantized values there are, those beyond the narrow range too, times one: what comes out is
// the value.
TEST(cuda_matmuls_with_each_quantized_value) {
  std::mt19937 random(31);
  for (int bits : {8, 4}) {
    for (int in = 0; in < 3; ++in) {
      for (int64_t m : {8, 130}) {
        const int64_t k = 256, n = 4, least = bits == 8 ? -128 : -8;
        PackedRun run({m, k, n, 0, bits, false, in, 0}, random);
        Weights& w = run.weights;
        for (int64_t i = 0; i < k * n; ++i) {
          w.qvalues[static_cast<size_t>(i)] =
              static_cast<int8_t>(least + (i / n + 5 * (i % n)) % (-2 * least));
        }
        for (float& scale : w.scales) scale = 1.0f;
        w.pack_again();
        for (int64_t first = 0; first < k; first += m) {
          for (int64_t i = 0; i < m * k; ++i) {
            set_element(run.x.get(), kFloats[in], i, i % k == first + i / k ? 1.0f : 0.0f);
          }
          run.on_device();
          bool good = true;
          for (int64_t i = 0; i < m && first + i < k; ++i) {
            for (int64_t c = 0; c < n; ++c) good = good && run.at(i * n + c) == w.qvalue(first + i, c);
          }
          CHECK_THAT(good, run.text());
        }
      }
    }
  }
}

// float32 has 24 bits, which three numbers of bfloat16 have together.
TEST(cuda_matmuls_keep_all_bits_of_float32) {
  std::mt19937 random(32);
  for (int bits : {8, 4}) {
    PackedRun run({8, 64, 5, 0, bits, false, 0, 0}, random);
    Weights& w = run.weights;
    for (int8_t& value : w.qvalues) value = 1;
    for (float& scale : w.scales) scale = 1.0f;
    w.pack_again();
    for (float number : {16777215.0f, -8388609.0f, 1.00000012f, 3.4028234e38f, 1.17549435e-30f}) {
      for (int64_t i = 0; i < 8 * 64; ++i) {
        set_element(run.x.get(), DType::F32, i, i % 64 == i / 64 * 7 ? number : 0.0f);
      }
      run.on_device();
      bool good = true;
      for (int64_t i = 0; i < 40; ++i) good = good && run.at(i) == static_cast<double>(number);
      CHECK_THAT(good, run.text());
    }
  }
}

TEST(cuda_matmuls_of_values_at_the_ends_of_float32) {
  std::mt19937 random(24);
  for (int64_t m : {2, 66, 260}) {
    for (int64_t group : {0, 32}) {
      for (float size : {1e-37f, 1e-20f, 3e37f}) {
        PackedRun run({m, 64, 17, group, 8, true, 0, 0}, random);
        // Sums of products go beyond float32 where sums of quantized values, times scales, don't.
        if (size > 1.0f && cuda::PackedWorkspace(run.args).rounds) continue;
        for (int64_t i = 0; i < m * 64; ++i) {
          set_element(run.x.get(), DType::F32, i, size * static_cast<float>(i % 9 - 4));
        }
        for (int64_t i = 0; i < 64; ++i) set_element(run.x.get(), DType::F32, i, 0.0f);
        check_values(run);
      }
    }
  }
}

TEST(cuda_matmuls_of_rows_that_are_not_finite) {
  std::mt19937 random(25);
  for (bool quantizes : {true, false}) {
    for (int64_t m : {3, 70, 270}) {
      for (int in : {0, 1}) {
        for (int64_t group : {0, 32}) {
          for (float bad : {kNan, kInfinity, -kInfinity}) {
            if (!takes_case()) continue;
            PackedRun run({m, 64, 20, group, 8, quantizes, in, 0}, random);
            run.on_device();
            Buffer before(run.found.size(), 0);
            std::memcpy(before.get(), run.found.get(), static_cast<size_t>(before.size()));
            set_element(run.x.get(), kFloats[in], 64 + 63, bad);
            run.on_device();
            bool good = run.sound;
            for (int64_t i = 0; i < m * 20; ++i) {
              const bool mine = i / 20 == 1;
              good = good && (mine ? !std::isfinite(run.at(i))
                                   : run.at(i) == element(before.get(), DType::F32, i));
              if (mine && std::isnan(bad)) good = good && std::isnan(run.at(i));
            }
            CHECK_THAT(good, run.text());
          }
        }
      }
    }
  }
}

TEST(cuda_matmuls_with_a_damaged_header) {
  std::mt19937 random(26);
  for (bool quantizes : {true, false}) {
    for (int64_t m : {3, 70, 270}) {
      for (int64_t group : {0, 32}) {
        for (int64_t byte : {0, 4, 5, 6, 7, 8, 12, 17, 24}) {
          if (!takes_case()) continue;
          PackedRun run({m, 64, 35, group, quantizes ? 8 : 4, quantizes, 1, 0}, random);
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

// Scales that float16 doesn't have, and groups that are small beside others of their column.
TEST(cuda_matmuls_of_floats_with_scales_of_many_sizes) {
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
      check_values(run);
    }
  }
}

}  // namespace

#endif
