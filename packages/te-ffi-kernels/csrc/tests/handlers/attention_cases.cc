// Calls of attention in training.
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
    {set("input_batch", -1), "attributes of sizes must be at least 0, got -1"},
    {set("num_gqa_groups", 3), "attn_heads must be a multiple of num_gqa_groups, 3, got 2"},
    {set("qk_head_dim", 0), "and max_segments_per_seq must be positive, got 0, 8 and 1"},
    {set("qkv_layout", 6), "qkv_layout must be 5, 7, 9, 10, 12 or 14, got 6"},
    {set("qkv_layout", 5), "with which keys are as many as queries"},
    {[](Program& p) {
       p.attributes.at("qkv_layout") = 7;
       p.attributes.at("v_head_dim") = 4;
     },
     "qk_head_dim must be v_head_dim, 4, with qkv_layout"},
    {set("bias_type", 3), "bias_type must be from 0 to 2, got 3"},
    {set("mask_type", -1), "mask_type must be from 0 to 5, got -1"},
    {set("softmax_type", 3), "softmax_type must be from 0 to 2, got 3"},
    {set("qkv_layout", 14), "which a THD layout doesn't have"},
    {set("bias_heads", 3), "bias_heads must be 1, or 2 and 2, got 1 and 3"},
    {set("dropout_probability", 1.0), "dropout_probability must be in [0, 1), got 1"},
    {operand(0, kS8, {kBatch, kQueries, kHeads, kSize}), "q must ... got int8"},
    {operand(0, kF32, {1}), "q must have 96 numbers, as the attributes have it, got float32[1]"},
    {operand(1, kBF16, {kBatch, kKeys, 1, kSize}), "k must ... got bfloat16"},
    {operand(1, kF32, {1}), "k must have 64"},
    {operand(2, kF32, {1}), "v must have 64"},
    {operand(3, kF32, {1}), "bias must have 12"},
    {operand(4, kF32, {1}), "softmax_offset must have 2"},
    {operand(4, kBF16, {kHeads}), "softmax_offset must ... got bfloat16[2]"}};

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
          also({{operand(5, kS32, {2}), "seed must be of: uint32, got int32[2]"},
                {[](Program& p) {
                   p.attributes.at("dropout_probability") = 0.5;
                   p.operands[5] = Tensor(kU32, {1});
                 },
                 "seed must have two numbers"},
                {operand(6, kU32, {3}), "q_cu_seqlens must ... got uint32[3]"},
                {operand(7, kS32, {2}), "kv_cu_seqlens must have at least 3 numbers, got int32[2]"},
                {result(0, kF32, {1}), "output must ... got float32[1]"},
                {result(0, kF16, {kBatch, kQueries, kHeads, kSize}), "output must ... got float16"},
                {result(1, kF32, {1}), "softmax_aux must ... got float32[1]"},
                {result(2, kS32, {4}), "rng_state must ... got int32[4]"}})};
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
          {{operand(8, kS32, {3}), "q_seq_offsets must ... got int32[3]"},
           {operand(9, kU32, {4}), "k_seq_offsets must ... got uint32[4]"}}};
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
          also({{operand(8, kF32, {1}), "doutput must ... got float32[1]"},
                {operand(7, kF32, {1}), "output must ... got float32[1]"},
                {operand(5, kF32, {1}), "softmax_aux must ... got float32[1]"},
                {[](Program& p) {
                   p.attributes.at("dropout_probability") = 0.5;
                   p.operands[6] = Tensor(kS32, {4});
                 },
                 "rng_state must ... got int32[4]"},
                {operand(9, kS32, {1}), "q_cu_seqlens must ... got int32[1]"},
                {result(0, kF16, {kBatch, kQueries, kHeads, kSize}), "dq must ... got float16"},
                {result(1, kF32, {1}), "k must ... got float32[1]"},
                {result(3, kF32, {1}), "dbias must ... got float32[1]"},
                {result(4, kF32, {1}), "dsoftmax_offset must ... got float32[1]"}})};
}

}  // namespace
