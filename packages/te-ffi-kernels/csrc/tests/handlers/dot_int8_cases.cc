// Calls of products of int8.
#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

CASE(dot_int8_of_groups) {
  Tensor lhs = filled(kS8, {2, 3, 4}, 2), scale = filled(kF32, {2, 5}, 0.5);
  set_number(lhs, 0, -3.0);   // row 0, column 0 of the first group
  set_number(scale, 1, 2.0);  // column 1
  return {{"te_ffi_kernels.dot_int8",
           {lhs, filled(kS8, {2, 3, 5}, 7), filled(kF32, {2, 4}, 10), scale},
           {Tensor(kF32, {2, 4, 5})},
           {{"lhs_last", false}, {"rhs_last", false}}},
          [](const Program& p) {
            expect_close(p.results[0], "out", [](int64_t i) {
              return (i < 5 ? 7 : 42) * 10 * (i < 20 && i % 5 == 1 ? 2.0 : 0.5);
            });
          },
          {{operand(0, kU8, {2, 3, 4}), "lhs must ... got uint8"},
           {operand(0, kS8, {24}), "lhs must have 2 axes or more"},
           {operand(1, kS32, {2, 3, 5}), "rhs must ... got int32"},
           {operand(1, kS8, {2, 4, 5}), "rhs must have 30 numbers, as many that are summed as of lhs"},
           {operand(2, kF16, {2, 4}), "lhs_scale must ... got float16"},
           {operand(2, kF32, {2, 3}), "lhs_scale must have 8 numbers, one for each sum over those of lhs"},
           {operand(3, kF32, {2, 4}), "rhs_scale must have 10 numbers, one for each sum over those of rhs"},
           {result(0, kS32, {2, 4, 5}), "out must ... got int32"},
           {result(0, kF32, {2, 5, 5}), "out must have 40 numbers, one for each pair of scales"}}};
}

CASE(dot_int8_of_what_ends_with_sums) {
  Tensor lhs = filled(kS8, {2, 3}, 2);
  set_number(lhs, 3, -5.0);  // row 1
  return {{"te_ffi_kernels.dot_int8",
           {lhs, filled(kS8, {4, 3}, 7), filled(kF32, {2}, 10), filled(kF32, {4}, 0.5)},
           {Tensor(kF32, {2, 4})},
           {{"lhs_last", true}, {"rhs_last", true}}},
          [](const Program& p) {
            expect_close(p.results[0], "out", [](int64_t i) { return (i < 4 ? 42 : -7) * 5; });
          },
          {{operand(1, kS8, {4, 2}), "rhs must have 12 numbers"},
           {operand(2, kF32, {3}), "lhs_scale must have 2 numbers"},
           {operand(3, kF32, {3}), "rhs_scale must have 4 numbers"},
           {result(0, kF32, {3, 4}), "out must have 8 numbers"}}};
}

}  // namespace
