// Calls of attention: in training, and over a cache.
#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

constexpr int64_t kBatch = 2, kQueries = 3, kKeys = 4, kHeads = 2, kSize = 8;

Dictionary attributes(int layout) {
  return {{"input_batch", kBatch},
          {"bias_batch", 1},
          {"q_max_seqlen", kQueries},
          {"kv_max_seqlen", kKeys},
          {"attn_heads", kHeads},
          {"num_gqa_groups", 1},
          {"bias_heads", 1},
          {"qk_head_dim", kSize},
          {"v_head_dim", kSize},
          {"max_segments_per_seq", 1},
          {"window_size_left", -1},
          {"window_size_right", -1},
          {"qkv_layout", layout},
          {"bias_type", 2},
          {"mask_type", 0},
          {"softmax_type", 1},
          {"bottom_right_diagonal", false},
          {"deterministic", true},
          {"scaling_factor", 0.25},
          {"is_training", true},
          {"dropout_probability", 0.0}};
}

std::vector<Tensor> sequences() {
  return {values(kS32, {0, 3, 6}), values(kS32, {0, 4, 8}), values(kS32, {0, 3}),
          values(kS32, {0, 4})};
}

// Operands 0 to 4 of both directions, in the layout of three arrays.
std::vector<Tensor> inputs() {
  return {normal({kBatch, kQueries, kHeads, kSize}), normal({kBatch, kKeys, 1, kSize}),
          normal({kBatch, kKeys, 1, kSize}), normal({1, 1, kQueries, kKeys}), normal({kHeads})};
}

// A row of probabilities. The sink, a score without a key, has the rest.
struct Row {
  Row(const Program& p, int64_t b, int64_t i, int64_t h) {
    const auto& in = p.operands;
    double sum = std::exp(number(in[4], h));
    for (int64_t j = 0; j < kKeys; ++j) {
      double score = number(in[3], i * kKeys + j);
      for (int64_t d = 0; d < kSize; ++d) {
        score += 0.25 * number(in[0], ((b * kQueries + i) * kHeads + h) * kSize + d) *
                 number(in[1], (b * kKeys + j) * kSize + d);
      }
      sum += prob[j] = std::exp(score);
    }
    for (double& one : prob) one /= sum;
    log_sum = std::log(sum);
  }

  double out(const Program& p, int64_t b, int64_t d) const {
    double sum = 0;
    for (int64_t j = 0; j < kKeys; ++j) {
      sum += prob[j] * number(p.operands[2], (b * kKeys + j) * kSize + d);
    }
    return sum;
  }

  double prob[kKeys], log_sum;
};

double out_at(const Program& p, int64_t i) {
  const int64_t d = i % kSize, h = i / kSize % kHeads, q = i / kSize / kHeads;
  return Row(p, q / kQueries, q % kQueries, h).out(p, q / kQueries, d);
}

double aux_at(const Program& p, int64_t i) {
  return Row(p, i / (kHeads * kQueries), i % kQueries, i / kQueries % kHeads).log_sum;
}

const std::vector<Bad> kBadAttributes = {
    {set("input_batch", -1), "an attribute that is a size is -1"},
    {set("num_gqa_groups", 3), "of which it must be a multiple"},
    {set("qk_head_dim", 0), "all must be positive"},
    {set("qkv_layout", 6), "qkv_layout is 6, and must be 5, 7, 9, 10, 12 or 14"},
    {set("qkv_layout", 5), "with which keys are as many as queries"},
    {[](Program& p) {
       p.attributes.at("qkv_layout") = 7;
       p.attributes.at("v_head_dim") = 4;
     },
     "with which qk_head_dim, 8, must be v_head_dim, 4"},
    {set("bias_type", 3), "bias_type is 3, and must be from 0 to 2"},
    {set("mask_type", -1), "mask_type is -1"},
    {set("softmax_type", 3), "softmax_type is 3"},
    {set("qkv_layout", 14), "which a THD layout doesn't have"},
    {set("bias_heads", 3), "bias_batch is 1 and bias_heads 3; they must be 1, or 2 and 2"},
    {set("dropout_probability", 1.0), "dropout_probability is 1, and must be in [0, 1)"},
    {operand(0, kS8, {kBatch, kQueries, kHeads, kSize}), "q is int8"},
    {operand(0, kF32, {1}), "q is float32[1], and must have 96 numbers, as the attributes have it"},
    {operand(1, kBF16, {kBatch, kKeys, 1, kSize}), "k is bfloat16"},
    {operand(1, kF32, {1}), "k is float32[1], and must have 64"},
    {operand(2, kF32, {1}), "v is float32[1], and must have 64"},
    {operand(3, kF32, {1}), "bias is float32[1], and must have 12"},
    {operand(4, kF32, {1}), "softmax_offset is float32[1], and must have 2"},
    {operand(4, kBF16, {kHeads}), "softmax_offset is bfloat16[2]"}};

std::vector<Bad> also(std::vector<Bad> more) {
  more.insert(more.end(), kBadAttributes.begin(), kBadAttributes.end());
  return more;
}

CASE(attention) {
  Program program{"te_ffi_kernels.fused_attn_forward",
                  inputs(),
                  {Tensor(kF32, {kBatch, kQueries, kHeads, kSize}),
                   Tensor(kF32, {kBatch, kHeads, kQueries, 1}), Tensor(kU32, {4})},
                  attributes(9)};
  program.operands.push_back(Tensor(kU32, {2}));
  program.operands[5].as<uint32_t>()[1] = 77;
  for (Tensor& one : sequences()) program.operands.push_back(one);
  return {program,
          [](const Program& p) {
            expect_close(p.results[0], "out", [&](int64_t i) { return out_at(p, i); });
            expect_close(p.results[1], "aux", [&](int64_t i) { return aux_at(p, i); });
            CHECK(p.results[2].as<uint32_t>()[1] == 77 && p.results[2].as<uint32_t>()[3] == 0);
          },
          also({{operand(5, kS32, {2}), "seed is int32[2], and must be of: uint32"},
                {[](Program& p) {
                   p.attributes.at("dropout_probability") = 0.5;
                   p.operands[5] = Tensor(kU32, {1});
                 },
                 "seed is uint32[1], and must have two numbers"},
                {operand(6, kU32, {3}), "q_cu_seqlens is uint32[3]"},
                {operand(7, kS32, {2}), "kv_cu_seqlens is int32[2], and must have at least 3"},
                {result(0, kF32, {1}), "output is float32[1]"},
                {result(0, kF16, {kBatch, kQueries, kHeads, kSize}), "output is float16"},
                {result(1, kF32, {1}), "softmax_aux is float32[1]"},
                {result(2, kS32, {4}), "rng_state is int32[4]"}})};
}

// Tokens of two sequences side by side, and lengths that are cut to what is there.
CASE(attention_of_packed_tokens) {
  Dictionary given = attributes(14);
  given.at("bias_type") = 0;
  given.at("softmax_type") = 0;
  given.at("mask_type") = 1;
  given.at("max_segments_per_seq") = 2;
  Program program{"te_ffi_kernels.fused_attn_forward",
                  {filled(kF32, {kBatch, kQueries, kHeads, kSize}, 0),
                   normal({kBatch, kKeys, 1, kSize}), normal({kBatch, kKeys, 1, kSize}),
                   Tensor(kF32, {0}), Tensor(kF32, {0}), Tensor(kU32, {2}),
                   values(kS32, {0, 2, 3, 4, 99}), values(kS32, {0, 3, 4, 6, 99}),
                   values(kS32, {0, 2, 3, 4}), values(kS32, {0, 3, 4, 6})},
                  {Tensor(kF32, {kBatch, kQueries, kHeads, kSize}),
                   Tensor(kF32, {kBatch, kQueries, kHeads}), Tensor(kU32, {4})},
                  given};
  return {program,
          [](const Program& p) {
            // Queries are zero, so each is the mean of the values of its sequence.
            constexpr int64_t kBegin[] = {0, 0, 3, 4, 6, 6}, kEnd[] = {3, 3, 4, 6, 8, 8};
            expect_close(p.results[0], "out", [&](int64_t i) {
              const int64_t token = i / kSize / kHeads, begin = kBegin[token], end = kEnd[token];
              double sum = 0;
              for (int64_t j = begin; j < end; ++j) sum += number(p.operands[2], j * kSize + i % kSize);
              return sum / static_cast<double>(end - begin);
            });
          },
          {{operand(8, kS32, {3}), "q_seq_offsets is int32[3]"},
           {operand(9, kU32, {4}), "k_seq_offsets is uint32[4]"}}};
}

CASE(attention_gradient) {
  Program program{"te_ffi_kernels.fused_attn_backward",
                  inputs(),
                  {Tensor(kF32, {kBatch, kQueries, kHeads, kSize}),
                   Tensor(kF32, {kBatch, kKeys, 1, kSize}), Tensor(kF32, {kBatch, kKeys, 1, kSize}),
                   Tensor(kF32, {1, 1, kQueries, kKeys}), Tensor(kF32, {kHeads})},
                  attributes(9)};
  Tensor out(kF32, {kBatch, kQueries, kHeads, kSize}), aux(kF32, {kBatch, kHeads, kQueries, 1});
  for (int64_t i = 0; i < out.size(); ++i) set_number(out, i, out_at(program, i));
  for (int64_t i = 0; i < aux.size(); ++i) set_number(aux, i, aux_at(program, i));
  for (const Tensor& one : {aux, Tensor(kU32, {4}), out, normal(out.dims)}) {
    program.operands.push_back(one);
  }
  for (Tensor& one : sequences()) program.operands.push_back(one);
  return {program,
          [](const Program& p) {
            // For each query, key and head: the probability, and the gradient of the score.
            const auto each = [&](const std::function<void(int64_t, int64_t, int64_t, int64_t,
                                                           double, double)>& with) {
              for (int64_t b = 0; b < kBatch; ++b) {
                for (int64_t i = 0; i < kQueries; ++i) {
                  for (int64_t h = 0; h < kHeads; ++h) {
                    const Row row(p, b, i, h);
                    const int64_t at = ((b * kQueries + i) * kHeads + h) * kSize;
                    double along[kKeys] = {}, mean = 0;
                    for (int64_t j = 0; j < kKeys; ++j) {
                      for (int64_t d = 0; d < kSize; ++d) {
                        along[j] += number(p.operands[8], at + d) *
                                    number(p.operands[2], (b * kKeys + j) * kSize + d);
                      }
                      mean += row.prob[j] * along[j];
                    }
                    for (int64_t j = 0; j < kKeys; ++j) {
                      with(b, i, h, j, row.prob[j], row.prob[j] * (along[j] - mean));
                    }
                  }
                }
              }
            };
            std::vector<Tensor> wanted = p.results;
            for (Tensor& one : wanted) one = filled(kF32, one.dims, 0);
            const auto add = [&](size_t which, int64_t at, double value) {
              set_number(wanted[which], at, number(wanted[which], at) + value);
            };
            each([&](int64_t b, int64_t i, int64_t h, int64_t j, double prob, double grad) {
              const int64_t q = ((b * kQueries + i) * kHeads + h) * kSize, k = (b * kKeys + j) * kSize;
              for (int64_t d = 0; d < kSize; ++d) {
                add(0, q + d, 0.25 * grad * number(p.operands[1], k + d));
                add(1, k + d, 0.25 * grad * number(p.operands[0], q + d));
                add(2, k + d, prob * number(p.operands[8], q + d));
              }
              add(3, i * kKeys + j, grad);
              add(4, h, -grad);  // gradients of all scores of a row, the sink's among them, sum to 0
            });
            for (size_t which = 0; which < 5; ++which) {
              expect_close(p.results[which], "gradient",
                           [&](int64_t i) { return number(wanted[which], i); }, 1e-4);
            }
          },
          also({{operand(8, kF32, {1}), "doutput is float32[1]"},
                {operand(7, kF32, {1}), "output is float32[1]"},
                {operand(5, kF32, {1}), "softmax_aux is float32[1]"},
                {[](Program& p) {
                   p.attributes.at("dropout_probability") = 0.5;
                   p.operands[6] = Tensor(kS32, {4});
                 },
                 "rng_state is int32[4]"},
                {operand(9, kS32, {1}), "q_cu_seqlens is int32[1]"},
                {result(0, kF16, {kBatch, kQueries, kHeads, kSize}), "dq is float16"},
                {result(1, kF32, {1}), "k is float32[1]"},
                {result(3, kF32, {1}), "dbias is float32[1]"},
                {result(4, kF32, {1}), "dsoftmax_offset is float32[1]"}})};
}

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
          {{set("window", -1), "window is -1, and must be at least 0"},
           {set("softcap", -1.0), "softcap is -1, and must be at least 0"},
           {set("heads_first", true), "the batch, the heads of keys"},
           {operand(0, kF32, {1}), "q is float32[1], and must have 5 axes"},
           {operand(0, kS8, {kBatch, 1, 2, kGroup, kSize}), "q is int8"},
           {operand(1, kS8, {kBatch, kPositions, 2, kSize}), "values is float32"},
           {operand(1, kS32, {kBatch, kPositions, 2, kSize}), "keys is int32"},
           {operand(1, kF32, {1}), "keys is float32[1], and must have 4 axes"},
           {operand(2, kF32, {kBatch, kPositions, 2, 1}), "that of keys"},
           {operand(3, kS32, {1}), "lengths is int32[1], and must have the shape [2]"},
           {operand(3, kF32, {2}), "lengths is float32[2]"},
           {operand(4, kPred, {3, 1, kPositions}), "and must be [2 or 1, 1 or 1, 6]"},
           {operand(4, kU8, {1, 1, kPositions}), "mask is uint8"},
           {result(0, kF32, {kBatch}), "that of q"},
           {result(0, kS8, {kBatch, 1, 2, kGroup, kSize}), "out is int8"}}};
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
           {operand(last, kF32, {}), "index is float32[]"},
           {operand(1, scaled ? kS8 : kF32, {0, kBatch, kPositions, 2, kSize}),
            "and must be a stack of one or more"},
           {operand(1, scaled ? kS8 : kF32, {kBatch, kPositions, 2, kSize}),
            "and must have 4 axes"}},
          {"stacked"}};
}

CASE(decode_of_a_stack) { return decode_of_stack(false); }

CASE(decode_of_a_stack_of_int8) { return decode_of_stack(true); }

CASE(decode_of_int8) {
  return {decode_program(kS8, true, false), expect_decoded,
          {{operand(4, kF32, {1}), "that of keys but for the last"},
           {operand(5, kBF16, {kBatch, kPositions, 2}), "value_scale is bfloat16"},
           {[](Program& p) {
              p.operands[1] = Tensor(kF32, {kBatch, kPositions, 2, kSize});
              p.operands[2] = p.operands[1];
            },
            "and int8 alone must have scales"}}};
}

}  // namespace
