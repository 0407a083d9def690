// Calls of what a mixture of experts takes: grouped_gemm_v2, the permutation of tokens, topk.
#include <algorithm>
#include <vector>

#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

constexpr int64_t kGroups = 3, kLength = 7, kK = 32, kN = 5;
const std::vector<int32_t> kSizes = {2, 0, 4};  // and one row of no group

// The group of a row, and kGroups for the last.
int64_t group_of(int64_t row) { return row < 2 ? 0 : row < 6 ? 2 : kGroups; }

Dictionary grouped_attributes(int scaling, int ragged) {
  return {{"scaling_mode", scaling},   {"lhs_axis_boundary", 1}, {"rhs_axis_boundary", 2 - ragged},
          {"lhs_is_trans", ragged == 1}, {"rhs_is_trans", false},  {"ragged", ragged}};
}

Program grouped_program(int scaling, XLA_FFI_DataType dtype, int ragged) {
  const bool rows = ragged == 0, quantized = scaling != 0;
  const std::vector<int64_t> rhs = rows ? std::vector<int64_t>{kGroups, kK, kN}
                                        : std::vector<int64_t>{kLength, kN};
  const std::vector<int64_t> out = rows ? std::vector<int64_t>{kLength, kN}
                                        : std::vector<int64_t>{kGroups, kK, kN};
  Program program{"te_ffi_kernels.grouped_gemm_v2",
                  {Tensor(dtype, {kLength, kK}), filled(kF32, {quantized ? kGroups : 0}, 0.5),
                   Tensor(dtype, rhs), filled(kF32, {quantized ? kGroups : 0}, 0.25),
                   normal({rows ? kGroups : 0, kN}), values(kS32, {2, 0, 4}),
                   values(kF32, {2, 3, 4}), Tensor(kF32, {kGroups})},
                  {Tensor(kF32, out), Tensor(kU8, {1})},
                  grouped_attributes(scaling, ragged)};
  for (size_t i : {0, 2}) {
    const Tensor draws = normal(program.operands[i].dims);
    for (int64_t j = 0; j < draws.size(); ++j) {
      set_number(program.operands[i], j,
                 quantized ? std::trunc(30 * number(draws, j)) : number(draws, j));
    }
  }
  return program;
}

void expect_rows(const Program& p, double factor) {
  expect_close(p.results[0], "rows of groups", [&](int64_t i) {
    const int64_t row = i / kN, group = group_of(row);
    if (group == kGroups) return 0.0;
    double sum = 0;
    for (int64_t k = 0; k < kK; ++k) {
      sum += number(p.operands[0], row * kK + k) *
             number(p.operands[2], (group * kK + k) * kN + i % kN);
    }
    return number(p.operands[6], group) * factor * sum +
           number(p.operands[4], group * kN + i % kN);
  }, 2e-5);
}

std::function<void(Program&)> first_size(int32_t size) {
  return [=](Program& p) { p.operands[5].as<int32_t>()[0] = size; };
}

CASE(grouped_gemm) {
  return {grouped_program(0, kF32, 0),
          [](const Program& p) { expect_rows(p, 1); },
          {{set("scaling_mode", 4), "must not be NVFP4, ... got 4"},
           {set("ragged", 2), "ragged must be 0 (rows) or 1"},
           {set("lhs_axis_boundary", 0), "lhs_axis_boundary must ... got 0"},
           {set("rhs_axis_boundary", 1), "must have a first axis of 3, one for each"},
           {set("lhs_is_trans", true), "rhs must have 7 contracted, as lhs"},
           {operand(0, kS8, {kLength, kK}), "must be of int8 like lhs"},
           {[](Program& p) {
              p.operands[0] = Tensor(kF32, {kLength, 1, kK});
              p.attributes.at("lhs_axis_boundary") = 2;
            },
            "must be divided along its first axis alone"},
           {operand(2, kBF16, {kGroups, kK, kN}), "must be of float32 like lhs"},
           {operand(2, kF32, {2, kK, kN}), "must have a first axis of 3"},
           {operand(2, kF32, {kGroups, 31, kN}), "rhs must have 32 contracted, as lhs, ... got 31"},
           {operand(4, kF32, {kN}), "one for each column and group"},
           {operand(4, kBF16, {kGroups, kN}), "bias must ... got bfloat16[3, 5]"},
           {operand(5, kS32, {kGroups, 1}), "must have 1 axes"},
           {operand(5, XLA_FFI_DataType_S64, {kGroups}), "must be of: int32"},
           {first_size(-1), "group_sizes[0] must be at least 0, got -1"},
           {first_size(4), "the sum of group_sizes must be at most 7"},
           {operand(6, kF32, {2}), "one for each group"},
           {operand(7, kF16, {kGroups}), "beta must ... got float16[3]"},
           {[](Program& p) { set_number(p.operands[7], 1, 1); },
            "beta[1] must be 0, got 1. The result has no value before"},
           {result(0, kS8, {kLength, kN}), "output must ... got int8[7, 5]"},
           {result(0, kF32, {kLength, 6}), "rows of lhs times columns of rhs"}}};
}

CASE(grouped_gemm_of_quantized_values) {
  return {grouped_program(1, kS8, 0),
          [](const Program& p) { expect_rows(p, 0.125); },
          {{operand(1, kF32, {1}), "one for each group"},
           {set("scaling_mode", 64), "one scale for each row or column"},
           {[](Program& p) {
              p.attributes.at("scaling_mode") = 2;
              p.operands[0] = Tensor(kE4M3, {kLength, kK});
              p.operands[1] = Tensor(kU8, {6});
              p.operands[2] = Tensor(kE4M3, {kGroups, kK, kN});
              p.operands[3] = Tensor(kU8, {kGroups * kN});
            },
            "one scale for 32 quantized values"},
           {[](Program& p) {
              p.attributes.at("scaling_mode") = 2;
              p.operands[0] = Tensor(kE4M3, {kK, kLength});
              p.operands[1] = Tensor(kU8, {kLength});
              p.attributes.at("lhs_is_trans") = true;
              p.operands[2] = Tensor(kE4M3, {kGroups, kK, kN});
              p.operands[3] = Tensor(kU8, {kGroups * kN});
            },
            "must be divided along its first axis with MX"}}};
}

CASE(grouped_gemm_of_what_is_contracted) {
  return {grouped_program(0, kF32, 1),
          [](const Program& p) {
            expect_close(p.results[0], "results of groups", [&](int64_t i) {
              const int64_t group = i / (kK * kN), m = i / kN % kK, n = i % kN;
              double sum = 0;
              for (int64_t row = 0; row < kLength; ++row) {
                if (group_of(row) != group) continue;
                sum += number(p.operands[0], row * kK + m) * number(p.operands[2], row * kN + n);
              }
              return number(p.operands[6], group) * sum;
            }, 2e-5);
          },
          {{operand(4, kF32, {kGroups, kN}), "must be empty where the contracted axis is divided"},
           {[](Program& p) {
              p.operands[2] = Tensor(kF32, {kN, kLength, 1});
              p.attributes.at("rhs_is_trans") = true;
            },
            "must be divided along its last axis alone"},
           {first_size(5), "the sum of group_sizes must be at most 7, ... got 9"},
           {[](Program& p) {
              p.attributes.at("scaling_mode") = 2;
              p.operands[0] = Tensor(kE4M3, {32, kK});
              p.operands[1] = Tensor(kU8, {kK});
              p.operands[2] = Tensor(kE4M3, {32, kN});
              p.operands[3] = Tensor(kU8, {kN});
            },
            "must be a multiple of 32 for MX blocks"}}};
}

constexpr int64_t kTokens = 4, kExperts = 3, kHidden = 5, kRows = 9;

// Which experts tokens go to, and the rows of that: 0 and 2, none, 2, 0 and 1.
const std::vector<double> kRouted = {1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0};
const std::vector<double> kMap = {0, 3, -1, 0, 2, -1, 2, -1, -1, -1, -1, -1, -1, 0,
                                  4, -1, -1, 2, -1, -1, 1, 1, 2, -1, 0, 1, -1, 2};

Tensor row_map() {
  Tensor map = values(kS32, kMap);
  map.dims = {kTokens, 2 * kExperts + 1};
  return map;
}

// With rows of experts in multiples of three.
Tensor offsets() { return values(kS32, {0, 1, 3}); }

// Calls body(token, expert, row).
template <class Body>
void each_place(Body&& body) {
  const int64_t pad[] = {0, 1, 3};
  for (int64_t t = 0; t < kTokens; ++t) {
    const double* mine = kMap.data() + t * (2 * kExperts + 1);
    for (int64_t i = 0; i < static_cast<int64_t>(mine[2 * kExperts]); ++i) {
      const auto expert = static_cast<int64_t>(mine[kExperts + i]);
      body(t, expert, static_cast<int64_t>(mine[i]) + pad[expert]);
    }
  }
}

CASE(make_row_id_map) {
  Tensor routed = values(kU8, kRouted);
  routed.dims = {kTokens, kExperts};
  return {{"te_ffi_kernels.make_row_id_map",
           {routed},
           {Tensor(kS32, {kTokens, 2 * kExperts + 1}), Tensor(kS32, {kExperts})},
           {}},
          [](const Program& p) {
            expect_close(p.results[0], "map", [](int64_t i) {
              return kMap[static_cast<size_t>(i)];
            }, 0);
            expect_close(p.results[1], "counts", [](int64_t i) { return i == 1 ? 1.0 : 2.0; }, 0);
          },
          {{operand(0, kF32, {kTokens, kExperts}), "must be of: bool, uint8"},
           {operand(0, kU8, {kTokens}), "must have 2 axes"},
           {result(0, kS32, {kTokens, 6}), "twice the experts and one per token"},
           {result(0, kF32, {kTokens, 7}), "row_id_map must ... got float32"},
           {result(1, kS32, {2}), "one for each expert"}}};
}

CASE(permute) {
  return {{"te_ffi_kernels.permute_with_mask_map",
           {normal({kTokens, kHidden}), row_map(), normal({kTokens, kExperts}, kBF16), offsets()},
           {filled(kF32, {kRows, kHidden}, 7), filled(kBF16, {kRows}, 7)},
           {}},
          [](const Program& p) {
            std::vector<double> rows(kRows * kHidden), probs(kRows);
            each_place([&](int64_t token, int64_t expert, int64_t row) {
              probs[static_cast<size_t>(row)] = number(p.operands[2], token * kExperts + expert);
              for (int64_t h = 0; h < kHidden; ++h) {
                rows[static_cast<size_t>(row * kHidden + h)] =
                    number(p.operands[0], token * kHidden + h);
              }
            });
            expect_close(p.results[0], "rows", [&](int64_t i) {
              return rows[static_cast<size_t>(i)];
            }, 0);
            expect_close(p.results[1], "probs", [&](int64_t i) {
              return probs[static_cast<size_t>(i)];
            }, 0);
          },
          {{operand(0, kS8, {kTokens, kHidden}), "inp must ... got int8"},
           {operand(0, kF32, {3, kHidden}), "must have 4 rows, one for each token"},
           {operand(1, kS32, {kTokens, 6}), "must have twice the experts and one per token"},
           {operand(1, kF32, {kTokens, 7}), "row_id_map must ... got float32"},
           {operand(2, kF32, {kTokens}), "one for each token and expert, or none"},
           {operand(2, kF32, {kTokens, kExperts}), "permuted_probs must ... got bfloat16[9]"},
           {operand(3, kS32, {2}), "one for each expert, or none"},
           {result(0, kF32, {kRows, 4}), "rows as those of inp"},
           {result(0, kBF16, {kRows, kHidden}), "output must ... got bfloat16"},
           {result(1, kBF16, {kRows + 1}), "one for each row"}}};
}

// Rows and experts that there are not are left out.
CASE(permute_to_few_rows) {
  Program program{"te_ffi_kernels.permute_with_mask_map",
                  {normal({kTokens, kHidden}, kF16), row_map(), Tensor(kF32, {0}), Tensor(kS32, {0})},
                  {Tensor(kF16, {2, kHidden}), Tensor(kF32, {0})},
                  {}};
  program.operands[1].as<int32_t>()[6] = 1 << 30;   // rows of the first token
  program.operands[1].as<int32_t>()[4] = 77;        // an expert
  return {program,
          [](const Program& p) {
            expect_close(p.results[0], "rows", [&](int64_t i) {
              return number(p.operands[0], i < kHidden ? i : i + 2 * kHidden);
            }, 0);
          },
          {}};
}

CASE(unpermute) {
  return {{"te_ffi_kernels.unpermute_with_mask_map",
           {normal({kRows, kHidden}), row_map(), normal({kTokens, kExperts}), normal({kRows}, kF16),
            offsets()},
           {Tensor(kF32, {kTokens, kHidden}), filled(kF16, {kTokens, kExperts}, 7)},
           {}},
          [](const Program& p) {
            std::vector<double> sums(kTokens * kHidden), probs(kTokens * kExperts);
            each_place([&](int64_t token, int64_t expert, int64_t row) {
              const int64_t place = token * kExperts + expert;
              probs[static_cast<size_t>(place)] = number(p.operands[3], row);
              for (int64_t h = 0; h < kHidden; ++h) {
                sums[static_cast<size_t>(token * kHidden + h)] +=
                    number(p.operands[0], row * kHidden + h) * number(p.operands[2], place);
              }
            });
            expect_close(p.results[0], "sums", [&](int64_t i) {
              return sums[static_cast<size_t>(i)];
            });
            expect_close(p.results[1], "probs", [&](int64_t i) {
              return probs[static_cast<size_t>(i)];
            }, 0);
          },
          {{operand(0, kS8, {kRows, kHidden}), "inp must ... got int8"},
           {operand(2, kF32, {kTokens}), "one for each token and expert, or none"},
           {operand(3, kF16, {4}), "one for each row, or none"},
           {operand(3, kF32, {kRows}), "unpermuted_probs must ... got float16"},
           {operand(4, kS8, {kExperts}), "pad_offsets must ... got int8"},
           {result(0, kF32, {3, kHidden}), "must have 4 rows, one for each token"},
           {result(0, kF32, {kTokens, 4}), "rows as those of inp"},
           {result(1, kF16, {kTokens}), "one for each token and expert"}}};
}

CASE(unpermute_gradient) {
  return {{"te_ffi_kernels.unpermute_bwd_with_merging_probs",
           {normal({kTokens, kHidden}), row_map(), normal({kRows, kHidden}),
            normal({kTokens, kExperts}, kBF16), offsets()},
           {filled(kF32, {kRows, kHidden}, 7), Tensor(kBF16, {kTokens, kExperts})},
           {}},
          [](const Program& p) {
            std::vector<double> rows(kRows * kHidden), probs(kTokens * kExperts);
            each_place([&](int64_t token, int64_t expert, int64_t row) {
              const int64_t place = token * kExperts + expert;
              for (int64_t h = 0; h < kHidden; ++h) {
                const double grad = number(p.operands[0], token * kHidden + h);
                probs[static_cast<size_t>(place)] += grad * number(p.operands[2], row * kHidden + h);
                rows[static_cast<size_t>(row * kHidden + h)] = grad * number(p.operands[3], place);
              }
            });
            expect_close(p.results[0], "gradient of rows", [&](int64_t i) {
              return rows[static_cast<size_t>(i)];
            });
            expect_close(p.results[1], "gradient of probs", [&](int64_t i) {
              return probs[static_cast<size_t>(i)];
            }, 1e-2);
          },
          {{operand(0, kBF16, {kTokens, kHidden}), "output_grad must ... got bfloat16"},
           {operand(0, kF32, {kTokens, 4}), "rows as those of fwd_input"},
           {operand(2, kS8, {kRows, kHidden}), "fwd_input must ... got int8"},
           {operand(3, kBF16, {kTokens}), "one for each token and expert"},
           {operand(4, kS32, {1}), "one for each expert, or none"},
           {result(0, kF32, {kRows, 4}), "as fwd_input"},
           {result(1, kF32, {kTokens, kExperts}), "probs_grad must ... got float32"}}};
}

CASE(topk) {
  return {{"te_ffi_kernels.topk",
           {normal({2, 3, 40})},
           {Tensor(kF32, {2, 3, 2}), Tensor(kS32, {2, 3, 2})},
           {{"k_value", 2}}},
          [](const Program& p) {
            const Tensor& keys = p.operands[0];
            const auto best = [&](int64_t i) {
              int64_t first = 0, second = -1;
              for (int64_t j = 1; j < 40; ++j) {
                const double one = number(keys, i / 2 * 40 + j);
                if (one > number(keys, i / 2 * 40 + first)) {
                  second = first;
                  first = j;
                } else if (second < 0 || one > number(keys, i / 2 * 40 + second)) {
                  second = j;
                }
              }
              return i % 2 == 0 ? first : second;
            };
            expect_close(p.results[0], "values", [&](int64_t i) {
              return number(keys, i / 2 * 40 + best(i));
            }, 0);
            expect_close(p.results[1], "indices", [&](int64_t i) {
              return static_cast<double>(best(i));
            }, 0);
          },
          {{set("k_value", 0), "k_value must be positive, got 0"},
           {set("k_value", 41), "must have at least k_value, 41, in a row"},
           {operand(0, kS32, {2, 3, 40}), "keys must ... got int32"},
           {operand(0, kF32, {}), "must have at least k_value, 2, in a row"},
           {result(0, kF32, {2, 3, 3}), "k_value for each row"},
           {result(0, kBF16, {2, 3, 2}), "values must ... got bfloat16"},
           {result(1, kS32, {2, 3}), "k_value for each row"}}};
}

}  // namespace
