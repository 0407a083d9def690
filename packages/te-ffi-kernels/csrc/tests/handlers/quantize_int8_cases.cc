// Calls of quantizing for training.
#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

CASE(quantize_int8_by_column) {
  Tensor x = filled(kF32, {2, 1, 3, 4}, 1.0);
  set_number(x, 4, -2.0);  // row 1 of the first group
  return {{"te_ffi_kernels.quantize_int8",
           {x, filled(kF32, {2, 1, 3}, 127), filled(kF32, {2, 1, 3}, 0.25)},
           {Tensor(kS8, {2, 1, 3, 4}), Tensor(kF32, {2, 1, 4})},
           {{"by_row", false}, {"factors", true}, {"noise", 1}}},
          [](const Program& p) {
            expect_close(p.results[1], "scale", [](int64_t i) { return i == 0 ? 2 : 1; });
            expect_close(p.results[0], "out", [](int64_t i) {
              return i == 4 ? -127 : i == 0 || i == 8 ? 64 : 127;
            });
          },
          {{operand(0, kS32, {2, 1, 3, 4}), "x must ... got int32"},
           {operand(0, kF32, {6, 4}), "x must have 3 axes or more"},
           {operand(1, kF16, {2, 1, 3}), "factors must ... got float16"},
           {operand(1, kF32, {2, 1, 4}), "factors must have 6 numbers, one for each row"},
           {operand(2, kF32, {2, 1, 4}), "noise must have 6 numbers, one for each row"},
           {operand(2, kU32, {2, 1, 3}), "noise must ... got uint32"},
           {result(0, kU8, {2, 1, 3, 4}), "out must ... got uint8"},
           {result(0, kS8, {2, 1, 3}), "out must have 24 numbers, a quantized value for each of x"},
           {result(1, kF32, {2, 1, 3}), "scale must have 8 numbers, one for each column"},
           {set("noise", 4), "noise must be 0 to 3, got 4"}}};
}

CASE(quantize_int8_by_row) {
  return {{"te_ffi_kernels.quantize_int8",
           {filled(kBF16, {2, 1, 3, 40}, 2.0), filled(kU32, {2, 2}, 7)},
           {Tensor(kS8, {2, 1, 3, 40}), Tensor(kF32, {2, 1, 3})},
           {{"by_row", true}, {"factors", false}, {"noise", 2}}},
          [](const Program& p) {
            expect_close(p.results[1], "scale", [](int64_t) { return 2.0 / 127; });
            expect_close(p.results[0], "out", [](int64_t) { return 127; });
          },
          {{operand(1, kU32, {2}), "key must have 4 numbers, two words of a key for each group"},
           {operand(1, kF32, {2, 2}), "key must ... got float32"},
           {result(1, kF32, {2, 1, 40}), "scale must have 6 numbers, one for each row"}}};
}

}  // namespace
