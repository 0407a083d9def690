// Calls of products of int8 that are summed over rows.
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
           {}},
          [](const Program& p) {
            expect_close(p.results[0], "out", [](int64_t i) {
              return (i < 5 ? 7 : 42) * 10 * (i < 20 && i % 5 == 1 ? 2.0 : 0.5);
            });
          },
          {{operand(0, kU8, {2, 3, 4}), "lhs must ... got uint8"},
           {operand(0, kS8, {24}), "lhs must have 2 axes or more"},
           {operand(1, kS32, {2, 3, 5}), "rhs must ... got int32"},
           {operand(1, kS8, {2, 4, 5}), "rhs must have 30 numbers, rows as lhs has them"},
           {operand(2, kF16, {2, 4}), "lhs_scale must ... got float16"},
           {operand(2, kF32, {2, 3}), "lhs_scale must have 8 numbers, one for each column of lhs"},
           {operand(3, kF32, {2, 4}), "rhs_scale must have 10 numbers, one for each column of rhs"},
           {result(0, kS32, {2, 4, 5}), "out must ... got int32"},
           {result(0, kF32, {2, 5, 5}), "out must have 40 numbers, a row for each column of lhs"}}};
}

}  // namespace
