// Calls of the quantizers.
#include <algorithm>

#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

constexpr int64_t kRows = 64, kCols = 96;

Program quantize_program(int scaling, int layout, XLA_FFI_DataType qtype,
                         std::vector<int64_t> scales, std::vector<int64_t> turned_scales,
                         XLA_FFI_DataType scale_dtype = kF32) {
  return {"te_ffi_kernels.dbias_quantize",
          {normal({kRows, kCols}), filled(kF32, {1}, 20.0), filled(kF32, {1}, 0.5),
           Tensor(kU32, {1}), Tensor(kF32, {1}), Tensor(kBF16, {1})},
          {Tensor(qtype, {kRows, kCols}), Tensor(qtype, {kCols, kRows}),
           Tensor(scale_dtype, scales), Tensor(scale_dtype, turned_scales), Tensor(kF32, {1}),
           Tensor(kF32, {kCols}), Tensor(kU8, {1})},
          {{"scaling_mode", scaling},
           {"q_layout", layout},
           {"is_dbias", true},
           {"flatten_axis", -1},
           {"stochastic_rounding", false},
           {"use_rht", false}}};
}

double int8_of(double x) { return std::clamp(std::nearbyint(x), -127.0, 127.0); }

CASE(quantize_by_tensor) {
  return {quantize_program(1, 2, kS8, {1}, {1}),
          [](const Program& p) {
            const Tensor& x = p.operands[0];
            const auto qvalue = [&](int64_t i) {
              return int8_of(static_cast<double>(x.as<float>()[i] * 20.0f));
            };
            expect_close(p.results[0], "quantized values", qvalue, 0);
            expect_close(p.results[1], "turned quantized values", [&](int64_t i) {
              return qvalue(i % kRows * kCols + i / kRows);
            }, 0);
            for (size_t i : {2, 3}) expect_close(p.results[i], "inverse", [](int64_t) { return 0.05; });
            double most = 0.5;
            for (int64_t i = 0; i < x.size(); ++i) most = std::max(most, std::fabs(number(x, i)));
            expect_close(p.results[4], "amax", [&](int64_t) { return most; }, 0);
            expect_close(p.results[5], "dbias", [&](int64_t col) {
              double sum = 0;
              for (int64_t row = 0; row < kRows; ++row) sum += number(x, row * kCols + col);
              return sum;
            });
          },
          {{set("scaling_mode", 4), "must not be NVFP4, ... got 4"},
           {set("scaling_mode", 6), "must be 0 (none), 1 (delayed"},
           {set("scaling_mode", 0), "scaling_mode must be one that quantizes, got 0"},
           {set("q_layout", 3), "q_layout must be"},
           {set("stochastic_rounding", true), "stochastic_rounding must be false"},
           {set("use_rht", true), "use_rht must be false"},
           {set("flatten_axis", 0), "must have axes of x, float32[64, 96], on both"},
           {set("flatten_axis", 2), "flatten_axis must ... got 2"},
           {set("flatten_axis", -2), "flatten_axis must ... got -2"},
           {operand(0, kS32, {kRows, kCols}), "must be of: float32, bfloat16, float16"},
           {operand(1, kBF16, {1}), "scale must be of: float32, got bfloat16[1]"},
           {operand(1, kF32, {2}), "what x is multiplied with"},
           {operand(2, kF32, {0}), "the largest magnitude so far"},
           {operand(2, kF16, {1}), "amax must be of: float32, got float16[1]"},
           {result(0, kS32, {kRows, kCols}), "must be of: float8_e4m3fn, float8_e5m2, int8"},
           {result(0, kS8, {kRows, 1}), "one quantized value for each of x"},
           {result(1, kE4M3, {kCols, kRows}), "must be of int8 like output"},
           {result(2, kBF16, {1}), "scale_inv must ... got bfloat16[1]"},
           {result(3, kF32, {2}), "the scale of all quantized values"},
           {result(4, kF32, {2}), "the largest magnitude"},
           {result(5, kF32, {1}), "one for each column of x"},
           {result(5, kBF16, {kCols}), "dbias must be of: float32, got bfloat16[96]"}}};
}

CASE(quantize_by_channel) {
  Program program = quantize_program(64, 2, kS8, {kRows}, {kCols});
  program.attributes.at("is_dbias") = false;
  return {program,
          [](const Program& p) {
            const Tensor& x = p.operands[0];
            const auto most = [&](int64_t from, int64_t count, int64_t step) {
              float found = 0;
              for (int64_t i = 0; i < count; ++i) {
                found = std::max(found, std::fabs(x.as<float>()[from + i * step]));
              }
              return static_cast<double>(found);
            };
            const auto row = [&](int64_t i) { return most(i * kCols, kCols, 1) / 127; };
            const auto col = [&](int64_t i) { return most(i, kRows, kCols) / 127; };
            expect_close(p.results[2], "scales of rows", row);
            expect_close(p.results[3], "scales of columns", col);
            // A number halfway between two quantized values may go to either.
            expect_close(p.results[0], "quantized values", [&](int64_t i) {
              const double exact = number(x, i) / number(p.results[2], i / kCols);
              const double found = number(p.results[0], i);
              return std::fabs(found - exact) <= 0.5001 ? found : exact;
            }, 0);
            expect_close(p.results[1], "turned quantized values", [&](int64_t i) {
              const double exact = number(x, i % kRows * kCols + i / kRows) /
                                   number(p.results[3], i / kRows);
              const double found = number(p.results[1], i);
              return std::fabs(found - exact) <= 0.5001 ? found : exact;
            }, 0);
            expect_close(p.results[5], "no dbias", [](int64_t) { return 0.0; }, 0);
          },
          {{result(2, kF32, {1}), "one scale for each row or column"},
           {result(3, kF32, {1}), "one scale for each row or column"}}};
}

// Quantized values of 3 bits of mantissa, of 32 numbers that share a power of two.
void expect_near(const Tensor& qvalues, const Tensor& scales, const Tensor& x, bool by_column) {
  Program back{"te_ffi_kernels.dequantize",
               {qvalues, filled(kF32, {1}, 0), filled(kF32, {1}, 1), scales},
               {Tensor(kF32, {kRows, kCols})},
               {{"scaling_mode", 2}, {"is_colwise", by_column}, {"flatten_axis", -1}}};
  back.operands[0].dims = {kRows, kCols};
  CHECK(run(back, nullptr).ok());
  bool good = true;
  for (int64_t i = 0; i < x.size(); ++i) {
    const double one = number(x, i);
    // An eighth of the least power of two, or a subnormal of the largest of the block.
    good = good && std::fabs(number(back.results[0], i) - one) <= std::fabs(one) / 14 + 0.01;
  }
  CHECK_THAT(good, by_column ? "MX by column" : "MX by row");
}

CASE(quantize_in_blocks) {
  return {quantize_program(2, 2, kE4M3, {kRows, kCols / 32}, {kRows / 32, kCols}, kU8),
          [](const Program& p) {
            expect_near(p.results[0], p.results[2], p.operands[0], false);
            expect_near(p.results[1], p.results[3], p.operands[0], true);
          },
          {{result(0, kS8, {kRows, kCols}), "must be of: float8_e4m3fn, float8_e5m2"},
           {result(2, kF32, {kRows, 3}), "must be of: float8_e8m0fnu, uint8"},
           {result(2, kU8, {3}), "one scale for 32 quantized values"},
           {[](Program& p) {
              p.operands[0] = normal({kRows, 33});
              p.results[0] = Tensor(kE4M3, {kRows, 33});
            },
            "columns (axes from flatten_axis) ... must be a multiple of 32 for MX blocks, got 33"},
           {[](Program& p) {
              p.attributes.at("q_layout") = 1;
              p.operands[0] = normal({33, kCols});
              p.results[1] = Tensor(kE4M3, {33, kCols});
            },
            "rows (axes before flatten_axis) ... got 33"}}};
}

CASE(dequantize) {
  Program program{"te_ffi_kernels.dequantize",
                  {Tensor(kS8, {4, 5}), Tensor(kF32, {1}), Tensor(kF32, {1}), normal({4})},
                  {Tensor(kF32, {4, 5})},
                  {{"scaling_mode", 64}, {"is_colwise", false}, {"flatten_axis", -1}}};
  for (int64_t i = 0; i < 20; ++i) program.operands[0].as<int8_t>()[i] = static_cast<int8_t>(13 * i - 128);
  return {program,
          [](const Program& p) {
            expect_close(p.results[0], "numbers", [&](int64_t i) {
              return number(p.operands[0], i) * number(p.operands[3], i / 5);
            });
          },
          {{set("scaling_mode", 0), "scaling_mode must be one that quantizes, got 0"},
           {set("scaling_mode", 1), "the scale of all quantized values"},
           {set("flatten_axis", 5), "flatten_axis must ... got 5"},
           {operand(0, kF32, {4, 5}), "must be of: float8_e4m3fn, float8_e5m2, int8"},
           {operand(3, kF32, {5}), "one scale for each row or column"},
           {operand(3, kBF16, {4}), "scale_inv must ... got bfloat16[4]"},
           {result(0, kS8, {4, 5}), "must be of: float32, bfloat16, float16"},
           {result(0, kF32, {4, 4}), "one for each quantized value"},
           {[](Program& p) {
              p.attributes.at("scaling_mode") = 2;
              p.operands[0] = Tensor(kE4M3, {4, 5});
              p.operands[3] = Tensor(kU8, {4});
            },
            "columns (axes from flatten_axis) ... got 5"},
           {[](Program& p) {
              p.attributes.at("scaling_mode") = 2;
              p.operands[0] = Tensor(kE5M2, {4, 32});
              p.operands[3] = Tensor(kU8, {5});
              p.results[0] = Tensor(kF32, {4, 32});
            },
            "one scale for 32 quantized values"}},
          {"scaling_mode", "is_colwise", "flatten_axis"}};
}

Program grouped_program(int scaling, XLA_FFI_DataType qtype, std::vector<int64_t> scales,
                        XLA_FFI_DataType scale_dtype) {
  return {"te_ffi_kernels.grouped_quantize",
          {normal({5, 2, 32}), values(kF32, {10, 20, 30}), values(kS32, {2, 0, 3})},
          {Tensor(qtype, {5, 2, 32}), Tensor(qtype, {320}), Tensor(scale_dtype, scales),
           Tensor(scale_dtype, scales), Tensor(kF32, {3}), Tensor(kU8, {64})},
          {{"scaling_mode", scaling}, {"q_layout", 2}, {"flatten_axis", -1}}};
}

CASE(grouped_quantize) {
  return {grouped_program(1, kS8, {3}, kF32),
          [](const Program& p) {
            const Tensor& x = p.operands[0];
            const auto qvalue = [&](int64_t i) {
              return int8_of(static_cast<double>(x.as<float>()[i] * (i < 128 ? 10.0f : 30.0f)));
            };
            expect_close(p.results[0], "quantized values", qvalue, 0);
            expect_close(p.results[1], "quantized values turned in each group", [&](int64_t i) {
              const int64_t rows = i < 128 ? 4 : 6, from = i < 128 ? 0 : 128, at = i - from;
              return qvalue(from + at % rows * 32 + at / rows);
            }, 0);
            expect_close(p.results[2], "inverses",
                         [&](int64_t i) { return 1 / number(p.operands[1], i); });
          },
          {{operand(2, kS32, {3, 1}), "must have 1 axes"},
           {operand(2, XLA_FFI_DataType_S64, {3}), "must be of: int32"},
           {[](Program& p) { p.operands[2].as<int32_t>()[0] = -1; },
            "group_sizes[0] must be at least 0, got -1"},
           {[](Program& p) { p.operands[2].as<int32_t>()[0] = 3; },
            "the sum of group_sizes must be at most"},
           {operand(1, kF32, {2}), "what each group is multiplied with"},
           {result(0, kS8, {5, 2, 31}), "one quantized value for each of x"},
           {result(2, kF32, {2}), "one for each group"},
           {result(4, kF32, {2}), "one for each group"},
           {set("scaling_mode", 0), "must be one that quantizes, got 0"},
           {set("scaling_mode", 64), "one scale for each row or column"},
           {set("q_layout", -1), "q_layout must ... got -1"},
           {set("flatten_axis", 7), "flatten_axis must ... got 7"}}};
}

CASE(grouped_quantize_in_blocks) {
  Program program = grouped_program(2, kE4M3, {10}, kU8);
  program.attributes.at("q_layout") = 0;
  return {program,
          [](const Program& p) {
            Program back{"te_ffi_kernels.dequantize",
                         {p.results[0], Tensor(kF32, {1}), Tensor(kF32, {1}), p.results[2]},
                         {Tensor(kF32, {5, 2, 32})},
                         {{"scaling_mode", 2}}};
            CHECK(run(back, nullptr).ok());
            bool good = true;
            for (int64_t i = 0; i < 320; ++i) {
              const double one = number(p.operands[0], i);
              good = good && std::fabs(number(back.results[0], i) - one) <=
                                 std::fabs(one) / 14 + 0.01;
            }
            CHECK(good);
            expect_close(p.results[3], "no scales by column", [](int64_t) { return 0.0; }, 0);
          },
          {{set("q_layout", 2), "must be a multiple of 32 for MX blocks by column"},
           {operand(0, kF32, {5, 4, 16}),
            "columns (axes from flatten_axis) ... got 16"},
           {operand(0, kF32, {5, 2, 16}), "one quantized value for each of x"}}};
}

}  // namespace
