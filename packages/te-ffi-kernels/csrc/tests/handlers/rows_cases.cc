// Calls of norms, activations and softmax.
#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

constexpr int64_t kRows = 3, kCols = 40;

Program norm_program(int kind) {
  return {"te_ffi_kernels.norm_forward",
          {normal({kRows, kCols}), filled(kF32, {1}, 1), filled(kF32, {1}, 0), normal({kCols}),
           normal({kCols})},
          {Tensor(kF32, {kRows, kCols}), Tensor(kF32, {1}), Tensor(kF32, {1}), Tensor(kF32, {1}),
           Tensor(kF32, {1}), Tensor(kF32, {kRows}), Tensor(kF32, {kRows}), Tensor(kU8, {1})},
          {{"norm_type", kind},
           {"zero_centered_gamma", false},
           {"epsilon", 1e-5},
           {"scaling_mode", 0},
           {"quantize_layout", 0},
           {"output_amax_when_no_scaling", true}}};
}

struct Row {
  double mean = 0, rsigma = 0;
};

Row row_of(const Tensor& x, int64_t row, bool layer) {
  Row made;
  double square = 0;
  for (int64_t i = 0; layer && i < kCols; ++i) made.mean += number(x, row * kCols + i) / kCols;
  for (int64_t i = 0; i < kCols; ++i) {
    square += std::pow(number(x, row * kCols + i) - made.mean, 2) / kCols;
  }
  made.rsigma = 1 / std::sqrt(square + 1e-5);
  return made;
}

void expect_norm(const Program& p, bool layer) {
  const Tensor& x = p.operands[0];
  double most = 0;
  const auto wanted = [&](int64_t i) {
    const Row row = row_of(x, i / kCols, layer);
    return (number(x, i) - row.mean) * row.rsigma * number(p.operands[3], i % kCols) +
           (layer ? number(p.operands[4], i % kCols) : 0);
  };
  for (int64_t i = 0; i < x.size(); ++i) most = std::max(most, std::fabs(wanted(i)));
  expect_close(p.results[0], "norm", wanted);
  expect_close(p.results[4], "amax", [&](int64_t) { return most; });
  expect_close(p.results[5], "mean", [&](int64_t i) { return row_of(x, i, layer).mean; });
  expect_close(p.results[6], "rsigma", [&](int64_t i) { return row_of(x, i, layer).rsigma; });
}

CASE(layer_norm) {
  return {norm_program(0),
          [](const Program& p) { expect_norm(p, true); },
          {{set("norm_type", 2), "norm_type must be 0 (layer norm) or 1 (RMS norm), got 2"},
           {set("epsilon", -1.0), "epsilon must be 0 or more, got -1"},
           {set("scaling_mode", 1), "output_amax_when_no_scaling is set, and scaling_mode is 1"},
           {set("quantize_layout", 9), "q_layout must ... got 9"},
           {operand(0, kS8, {kRows, kCols}), "x must ... got int8[3, 40]"},
           {operand(0, kF32, {}), "x must have an axis, got float32[]"},
           {operand(3, kF32, {2}), "gamma must have 40 numbers"},
           {operand(3, kF16, {kCols}), "gamma must ... got float16[40]"},
           {operand(4, kF32, {2}), "beta must ... got float32[2]"},
           {operand(4, kBF16, {kCols}), "beta must ... got bfloat16[40]"},
           {operand(2, kF32, {2}), "the largest magnitude so far"},
           {result(0, kBF16, {kRows, kCols}), "output must ... got bfloat16[3, 40]"},
           {result(0, kF32, {kRows}), "one for each number of the result"},
           {result(4, kF32, {0}), "the largest magnitude"},
           {result(5, kF32, {2}), "mu must have 3 numbers"},
           {result(6, kF32, {2}), "rsigma must have 3 numbers"}}};
}

CASE(rms_norm) {
  return {norm_program(1), [](const Program& p) { expect_norm(p, false); }, {}};
}

// To quantized values of int8, with a scale that is given; quantized values by column as well.
CASE(layer_norm_to_quantized_values) {
  Program program = norm_program(0);
  program.operands[1] = filled(kF32, {1}, 16);
  program.results[0] = Tensor(kS8, {kRows, kCols});
  program.results[1] = Tensor(kS8, {kCols, kRows});
  program.attributes.at("scaling_mode") = 1;
  program.attributes.at("quantize_layout") = 2;
  program.attributes.at("output_amax_when_no_scaling") = false;
  return {program,
          [](const Program& p) {
            Program floats = norm_program(0);
            floats.operands = p.operands;
            CHECK(run(floats, nullptr).ok());
            expect_norm(floats, true);
            const auto qvalue = [&](int64_t i, const Tensor& qvalues, int64_t at) {
              const double exact = std::fmax(-127, std::fmin(127, 16 * number(floats.results[0], i)));
              const double found = number(qvalues, at);
              return std::fabs(found - exact) <= 0.501 ? found : exact;
            };
            expect_close(p.results[0], "quantized values",
                         [&](int64_t i) { return qvalue(i, p.results[0], i); }, 0);
            expect_close(p.results[1], "turned quantized values", [&](int64_t i) {
              return qvalue(i % kRows * kCols + i / kRows, p.results[1], i);
            }, 0);
          },
          {{operand(1, kF32, {2}), "what the result is multiplied with"},
           {result(1, kE4M3, {kCols, kRows}), "must be of int8 like output"},
           {result(2, kF32, {2}), "the scale of all quantized values"},
           {set("scaling_mode", 2), "must be of: float8_e4m3fn, float8_e5m2"}}};
}

CASE(norm_gradient) {
  return {{"te_ffi_kernels.norm_backward",
           {normal({kRows, kCols}), normal({kRows, kCols}), normal({kRows}), filled(kF32, {kRows}, 0.7),
            normal({kCols})},
           {Tensor(kF32, {kRows, kCols}), Tensor(kF32, {kCols}), Tensor(kF32, {kCols}),
            Tensor(kU8, {1})},
           {{"norm_type", 0}, {"zero_centered_gamma", true}}},
          [](const Program& p) {
            const auto at = [&](size_t which, int64_t i) { return number(p.operands[which], i); };
            const auto centred = [&](int64_t i) { return (at(1, i) - at(2, i / kCols)) * 0.7; };
            const auto grad = [&](int64_t i) { return at(0, i) * (1 + at(4, i % kCols)); };
            expect_close(p.results[0], "dx", [&](int64_t i) {
              double mean = 0, along = 0;
              for (int64_t j = i / kCols * kCols; j < (i / kCols + 1) * kCols; ++j) {
                mean += grad(j) / kCols;
                along += grad(j) * centred(j) / kCols;
              }
              return (grad(i) - mean - centred(i) * along) * 0.7;
            });
            for (size_t result : {1, 2}) {
              expect_close(p.results[result], "dgamma and dbeta", [&](int64_t col) {
                double sum = 0;
                for (int64_t row = 0; row < kRows; ++row) {
                  const int64_t i = row * kCols + col;
                  sum += at(0, i) * (result == 1 ? centred(i) : 1);
                }
                return sum;
              });
            }
          },
          {{set("norm_type", -1), "norm_type must ... got -1"},
           {operand(0, kF32, {kCols}), "dz must have 120 numbers"},
           {operand(0, kBF16, {kRows, kCols}), "dz must ... got bfloat16"},
           {operand(2, kF32, {2}), "mu must ... got float32[2]"},
           {operand(3, kF32, {2}), "rsigma must ... got float32[2]"},
           {result(0, kF32, {kCols}), "dx must ... got float32[40]"},
           {result(1, kF32, {2}), "dgamma must ... got float32[2]"},
           {result(2, kF32, {2}), "dbeta must ... got float32[2]"}}};
}

Dictionary clamp(float limit) {
  return {{"clamped_swiglu", Dictionary{{"limit", limit},
                                        {"alpha", 1.702f},
                                        {"glu_linear_offset", 1.0f}}}};
}

std::vector<Tensor> activation_results(std::vector<int64_t> dims) {
  return {Tensor(kF32, std::move(dims)), Tensor(kF32, {1}), Tensor(kF32, {1}), Tensor(kF32, {1}),
          Tensor(kF32, {1})};
}

// Transformer Engine's number of silu(a) * b.
constexpr int kSwiglu = 4;

double silu(double x) { return x / (1 + std::exp(-x)); }

double silu_gradient(double x) {
  const double s = 1 / (1 + std::exp(-x));
  return s * (1 + x * (1 - s));
}

CASE(activation) {
  return {{"te_ffi_kernels.act_lu",
           {normal({kRows, 2, kCols}), filled(kF32, {1}, 1), filled(kF32, {1}, 0)},
           activation_results({kRows, kCols}),
           {{"act_enum", kSwiglu},
            {"act_params", clamp(7)},
            {"scaling_mode", 0},
            {"quantize_layout", 0},
            {"output_amax_when_no_scaling", false}}},
          [](const Program& p) {
            expect_close(p.results[0], "silu(a) * b", [&](int64_t i) {
              const int64_t a = i / kCols * 2 * kCols + i % kCols;
              return silu(number(p.operands[0], a)) * number(p.operands[0], a + kCols);
            });
          },
          {{set("act_enum", 99), "act_enum must ... got 99"},
           {set("act_enum", 0), "the last axis but one of x must be 1"},
           {set("act_params", clamp(-1)), "the limit of act_params must be 0 or more, got -1"},
           {set("act_params", Dictionary{}), "act_params has no member clamped_swiglu"},
           {set("scaling_mode", 5), "must not be NVFP4, ... got 5"},
           {operand(0, kF32, {kCols}), "the last axis but one of x must be 2"},
           {operand(0, kS32, {kRows, 2, kCols}), "x must ... got int32[3, 2, 40]"},
           {result(0, kF32, {kRows, 2, kCols}), "one for each number of the result"}}};
}

CASE(activation_gradient) {
  std::vector<Tensor> results = activation_results({kRows, 2, kCols});
  results.emplace_back(kF32, std::vector<int64_t>{2, kCols});
  results.emplace_back(kU8, std::vector<int64_t>{1});
  return {{"te_ffi_kernels.dact_dbias_quantize",
           {normal({kRows, kCols}), normal({kRows, 2, kCols}), filled(kF32, {1}, 1),
            filled(kF32, {1}, 0)},
           results,
           {{"act_enum", kSwiglu},
            {"act_params", clamp(7)},
            {"scaling_mode", 0},
            {"quantize_layout", 0},
            {"output_amax_when_no_scaling", false},
            {"is_dbias", true}}},
          [](const Program& p) {
            const auto wanted = [&](int64_t i) {
              const int64_t row = i / (2 * kCols), col = i % kCols;
              const double dz = number(p.operands[0], row * kCols + col);
              const double a = number(p.operands[1], row * 2 * kCols + col);
              const double b = number(p.operands[1], (row * 2 + 1) * kCols + col);
              return i % (2 * kCols) < kCols ? dz * silu_gradient(a) * b : dz * silu(a);
            };
            expect_close(p.results[0], "dx", wanted);
            expect_close(p.results[5], "dbias", [&](int64_t i) {
              double sum = 0;
              for (int64_t row = 0; row < kRows; ++row) sum += wanted(row * 2 * kCols + i);
              return sum;
            });
          },
          {{operand(0, kF32, {kRows}), "one for each result of the activation"},
           {operand(0, kF16, {kRows, kCols}), "dz must ... got float16[3, 40]"},
           {result(5, kF32, {kCols}), "one for each column of x"},
           {operand(3, kF32, {3}), "the largest magnitude so far"}}};
}

enum Softmax { kScaled, kMasked, kCausal };
constexpr const char* kNames[] = {"scaled_softmax", "scaled_masked_softmax",
                                  "scaled_upper_triang_masked_softmax"};
constexpr int64_t kSide = 9;

// Whether softmax leaves out a number of [2, 3, kSide, kSide].
bool left_out(const Program& p, Softmax which, int64_t i) {
  const int64_t row = i / kSide % kSide, col = i % kSide, batch = i / (3 * kSide * kSide);
  if (which == kCausal) return col > row;
  return which == kMasked && number(p.operands[1], (batch * kSide + row) * kSide + col) != 0;
}

template <Softmax kWhich>
Case softmax_case() {
  Program program{std::string("te_ffi_kernels.") + kNames[kWhich] + "_forward",
                  {normal({2, 3, kSide, kSide})},
                  {Tensor(kF32, {2, 3, kSide, kSide})},
                  {{"scale_factor", 0.5}}};
  std::vector<Bad> bad = {{operand(0, kS8, {2, 3, kSide, kSide}), "input must ... got int8"},
                          {operand(0, kF32, {kSide}), "axes"},
                          {result(0, kBF16, {2, 3, kSide, kSide}), "output must ... got bfloat16"},
                          {result(0, kF32, {3, kSide, kSide}), "numbers, as input"}};
  if (kWhich == kMasked) {
    program.operands.emplace_back(kU8, std::vector<int64_t>{2, 1, kSide, kSide});
    Tensor& mask = program.operands[1];
    for (int64_t i = 0; i < mask.size(); ++i) mask.as<uint8_t>()[i] = i % 5 == 1;
    bad.push_back({operand(0, kF32, {kSide, kSide}), "must have at least 3 axes"});
    bad.push_back({operand(1, kF32, {2, 1, kSide, kSide}), "mask must ... got float32"});
    bad.push_back({operand(1, kU8, {2, 3, kSide, kSide}), "must end in [1, 9, 9]"});
    bad.push_back({operand(1, kU8, {3, 1, kSide, kSide}), "one for each of a batch of 2, got 3"});
  }
  return {program,
          [](const Program& p) {
            expect_close(p.results[0], "softmax", [&](int64_t i) {
              double sum = 0;
              for (int64_t j = i / kSide * kSide; j < (i / kSide + 1) * kSide; ++j) {
                if (!left_out(p, kWhich, j)) sum += std::exp(0.5 * number(p.operands[0], j));
              }
              return left_out(p, kWhich, i) ? 0.0 : std::exp(0.5 * number(p.operands[0], i)) / sum;
            });
          },
          bad};
}

template <Softmax kWhich>
Case softmax_gradient_case() {
  Program program{std::string("te_ffi_kernels.") + kNames[kWhich] + "_backward",
                  {normal({2, 3, kSide, kSide}), filled(kF32, {2, 3, kSide, kSide}, 0.25)},
                  {Tensor(kF32, {2, 3, kSide, kSide})},
                  {{"scale_factor", 0.5}}};
  return {program,
          [](const Program& p) {
            expect_close(p.results[0], "gradient", [&](int64_t i) {
              const int64_t row = i / kSide * kSide, query = i / kSide % kSide;
              const int64_t seen = kWhich == kCausal ? query + 1 : kSide;
              double along = 0;
              for (int64_t j = row; j < row + seen; ++j) along += 0.25 * number(p.operands[0], j);
              return i - row < seen ? 0.5 * 0.25 * (number(p.operands[0], i) - along) : 0.0;
            });
          },
          {{operand(0, kS8, {2, 3, kSide, kSide}), "grad_output must ... got int8"},
           {operand(1, kBF16, {2, 3, kSide, kSide}), "softmax_output must ... got bfloat16"},
           {operand(1, kF32, {kSide, kSide}), "numbers, as grad_output"},
           {operand(0, kF32, {kSide}), "must have at least 2 axes"},
           {result(0, kF32, {kSide, kSide}), "dgrad must ... got float32[9, 9]"}}};
}

const Registered kSoftmax[] = {
    Registered(softmax_case<kScaled>),          Registered(softmax_case<kMasked>),
    Registered(softmax_case<kCausal>),          Registered(softmax_gradient_case<kScaled>),
    Registered(softmax_gradient_case<kMasked>), Registered(softmax_gradient_case<kCausal>)};

}  // namespace
