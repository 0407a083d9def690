// Calls of attention over a cache.
#include <algorithm>

#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

constexpr int64_t kBatch = 2, kSize = 8;
constexpr int64_t kPositions = 6, kGroup = 2;

Program decode_program(XLA_FFI_DataType cache, bool scaled, bool masked) {
  Program program{"te_ffi_kernels.decode_attention",
                  {normal({kBatch, 1, 2, kGroup, kSize}), Tensor(cache, {kBatch, kPositions, 2, kSize}),
                   Tensor(cache, {kBatch, kPositions, 2, kSize}), values(kS32, {4, 6})},
                  {Tensor(kF32, {kBatch, 1, 2, kGroup, kSize})},
                  {{"scale", 0.5},
                   {"softcap", 0.0},
                   {"window", 0},
                   {"scaled", scaled},
                   {"masked", masked},
                   {"causal", true},
                   {"heads_first", false}}};
  for (size_t i : {1, 2}) {
    const Tensor draws = normal(program.operands[i].dims);
    for (int64_t j = 0; j < draws.size(); ++j) {
      set_number(program.operands[i], j, (scaled ? 40 : 1) * number(draws, j));
    }
  }
  for (int i = 0; i < 2 * scaled; ++i) {
    program.operands.push_back(filled(kF32, {kBatch, kPositions, 2}, 0.02 * (i + 1)));
  }
  if (masked) program.operands.push_back(filled(kPred, {1, 1, kPositions}, 1));
  return program;
}

void expect_decoded(const Program& p) {
  const bool scaled = std::get<bool>(p.attributes.at("scaled").value);
  const auto cached = [&](size_t which, int64_t b, int64_t at, int64_t head, int64_t d) {
    const int64_t line = (b * kPositions + at) * 2 + head;
    return number(p.operands[which], line * kSize + d) *
           (scaled ? number(p.operands[which + 3], line) : 1);
  };
  expect_close(p.results[0], "out", [&](int64_t i) {
    const int64_t head = i / kSize / kGroup % 2, b = i / kSize / kGroup / 2;
    double sum = 0, of_values = 0;
    for (int64_t at = 0; at < number(p.operands[3], b); ++at) {
      double score = 0;
      for (int64_t d = 0; d < kSize; ++d) {
        score += 0.5 * number(p.operands[0], i / kSize * kSize + d) * cached(1, b, at, head, d);
      }
      sum += std::exp(score);
      of_values += std::exp(score) * cached(2, b, at, head, i % kSize);
    }
    return of_values / sum;
  }, 1e-4);
}

CASE(decode) {
  return {decode_program(kF32, false, true), expect_decoded,
          {{set("window", -1), "window must be at least 0, got -1"},
           {set("softcap", -1.0), "softcap must be at least 0, got -1"},
           {set("heads_first", true), "the batch, the heads of keys"},
           {operand(0, kF32, {1}), "q must have 5 axes, got float32[1]"},
           {operand(0, kS8, {kBatch, 1, 2, kGroup, kSize}), "q must ... got int8"},
           {operand(1, kS8, {kBatch, kPositions, 2, kSize}), "values must ... got float32"},
           {operand(1, kS32, {kBatch, kPositions, 2, kSize}), "keys must ... got int32"},
           {operand(1, kF32, {1}), "keys must have 4 axes, got float32[1]"},
           {operand(2, kF32, {kBatch, kPositions, 2, 1}), "that of keys"},
           {operand(3, kS32, {1}), "lengths must have the shape [2]"},
           {operand(3, kF32, {2}), "lengths must ... got float32[2]"},
           {operand(4, kPred, {3, 1, kPositions}), "must be [2 or 1, 1 or 1, 6]"},
           {operand(4, kU8, {1, 1, kPositions}), "mask must ... got uint8"},
           {result(0, kF32, {kBatch}), "that of q"},
           {result(0, kS8, {kBatch, 1, 2, kGroup, kSize}), "out must ... got int8"}}};
}

// The second of three caches.
Case decode_of_stack(bool scaled) {
  Program program = decode_program(scaled ? kS8 : kF32, scaled, true);
  const Program plain = program;
  for (size_t i = 1; i < program.operands.size() - 1; ++i) {
    if (i == 3) continue;
    const Tensor one = program.operands[i];
    Tensor stack(one.dtype, one.dims);
    stack.dims.insert(stack.dims.begin(), 3);
    stack.fit();
    std::copy(one.bytes.begin(), one.bytes.end(),
              stack.bytes.begin() + static_cast<int64_t>(one.bytes.size()));
    program.operands[i] = stack;
  }
  Tensor index(kS32, {});
  index.as<int32_t>()[0] = -2;
  program.operands.push_back(index);
  program.attributes.insert({"stacked", true});
  const size_t last = program.operands.size() - 1;
  return {program,
          [plain](const Program& p) {
            Program one = plain;
            one.results = p.results;
            expect_decoded(one);
          },
          {{operand(last, kS32, {1}), "that of a scalar"},
           {operand(last, kF32, {}), "index must ... got float32[]"},
           {operand(1, scaled ? kS8 : kF32, {0, kBatch, kPositions, 2, kSize}),
            "must be a stack of one or more"},
           {operand(1, scaled ? kS8 : kF32, {kBatch, kPositions, 2, kSize}),
            "must have 4 axes"}},
          {"stacked"}};
}

CASE(decode_of_a_stack) { return decode_of_stack(false); }

CASE(decode_of_a_stack_of_int8) { return decode_of_stack(true); }

CASE(decode_of_int8) {
  return {decode_program(kS8, true, false), expect_decoded,
          {{operand(4, kF32, {1}), "that of keys but for the last"},
           {operand(5, kBF16, {kBatch, kPositions, 2}), "value_scale must ... got bfloat16"},
           {[](Program& p) {
              p.operands[1] = Tensor(kF32, {kBatch, kPositions, 2, kSize});
              p.operands[2] = p.operands[1];
            },
            "keys must have scales if they are int8"}}};
}

}  // namespace
