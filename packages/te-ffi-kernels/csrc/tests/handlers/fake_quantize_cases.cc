// Calls of fake quantization.
#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

CASE(fake_quantize) {
  // Of three rows the second has seen two ranges of [-1, 1].
  Tensor terms = filled(kF32, {3, 5, 2}, 0);
  const double sums[] = {-2, 2, 3, 3, -2, 2, 2, 2, 2, 2};
  for (int64_t i = 0; i < 10; ++i) set_number(terms, 10 + i, sums[i]);
  Tensor x = filled(kF32, {2, 10, 4}, 0.5);
  set_number(x, 3, -2.0);   // of row 0
  set_number(x, 77, 4.0);   // of row 9
  return {{"te_ffi_kernels.fake_quantize",
           {x, terms, filled(kS32, {}, 1), filled(kF32, {3, 2}, 7)},
           {Tensor(kF32, {2, 10, 4}), Tensor(kU8, {2, 2, 4}), Tensor(kF32, {2}), Tensor(kF32, {3, 2})},
           {{"bits", 8},
            {"symmetric", false},
            {"batch_axes", 1},
            {"bits_axis", 1},
            {"share", 1.0f},
            {"observe", true},
            {"join", false},
            {"seen", true}}},
          [](const Program& p) {
            // Means over two rows: [-2, 0.5] and [0, 4].
            const double own[] = {-1, 2.25}, average[] = {-1, 4.25 / 3};
            expect_close(p.results[2], "bounds", [&](int64_t i) { return average[i]; });
            expect_close(p.results[3], "seen",
                         [&](int64_t i) { return i / 2 == 1 ? own[i % 2] : 7; });
            expect_close(p.results[1], "inside", [](int64_t i) {
              const int all = i / 4 % 2 == 0 ? 255 : 3;  // of eight rows, or two
              return i == 3 ? all - 1 : i == 13 ? all - 2 : all;
            });
            const double scale = (average[1] + 1) / 255;
            const double zero = std::nearbyint(-128 + 1 / scale);
            expect_close(p.results[0], "x", [&](int64_t i) {
              const double steps = std::nearbyint(number(p.operands[0], i) / scale);
              return scale * std::fmin(127 - zero, std::fmax(-128 - zero, steps));
            });
          },
          {{operand(0, kS8, {2, 10, 4}), "x must ... got int8"},
           {operand(0, kF32, {}), "batch_axes must be a number of axes of x, float32[], got 1"},
           {operand(1, kF32, {3, 5}), "terms must have 3 axes"},
           {operand(1, kF32, {0, 5, 2}), "at least one row"},
           {operand(1, kF32, {3, 4, 2}), "terms must have the shape [3, 5, 2]"},
           {operand(2, kF32, {}), "row must ... got float32"},
           {operand(2, kS32, {2}), "row must have 1 number"},
           {operand(3, kF32, {2, 2}), "seen must have the shape [3, 2]"},
           {result(0, kBF16, {2, 10, 4}), "out must ... got bfloat16"},
           {result(1, kPred, {2, 2, 4}), "inside must ... got bool"},
           {result(1, kU8, {8}), "inside must have 16 numbers, a bit for each of x"},
           {result(2, kF32, {1}), "bounds must have the shape [2]"},
           {result(3, kF32, {2, 2}), "observed must have the shape [3, 2]"},
           {set("bits", 1), "bits must be 2 to 16, got 1"},
           {set("batch_axes", 4), "batch_axes must be a number of axes of x, ... got 4"},
           {set("bits_axis", 3), "bits_axis must be -1 or an axis of x, ... got 3"},
           {set("bits_axis", -2), "bits_axis must be -1 or an axis of x, ... got -2"},
           {set("seen", false), "observe must be false without seen"}}};
}

}  // namespace
