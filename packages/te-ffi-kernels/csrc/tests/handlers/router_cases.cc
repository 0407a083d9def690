// Calls of the router and of its loss.
#include <algorithm>

#include "tests/handlers/cases.h"

namespace {

using namespace jaxtap::testing;

constexpr int64_t kTokens = 5, kExperts = 8;

Dictionary options(int score, bool dense) {
  return {{"topk", 2},
          {"score_function", score},
          {"compute_aux_scores", dense ? 1 : 0},
          {"routing_map_format", 0},
          {"use_pre_softmax", 1},
          {"scaling_factor", 3.0}};
}

Dictionary forward_options(int score) {
  Dictionary made = options(score, false);
  made.insert({{"num_groups", 4}, {"group_topk", 0}});
  return made;
}

// [tokens, experts] to softmax of rows.
double softmax_at(const Tensor& logits, int64_t i) {
  double sum = 0;
  for (int64_t j = i / kExperts * kExperts; j < (i / kExperts + 1) * kExperts; ++j) {
    sum += std::exp(number(logits, j));
  }
  return std::exp(number(logits, i)) / sum;
}

// Whether an expert is one of the two best of `scores`.
bool chosen(const std::function<double(int64_t)>& scores, int64_t i) {
  int above = 0;
  for (int64_t j = i / kExperts * kExperts; j < (i / kExperts + 1) * kExperts; ++j) {
    above += scores(j) > scores(i);
  }
  return above < 2;
}

CASE(router) {
  return {{"te_ffi_kernels.fused_topk_with_score_function_forward",
           {normal({kTokens, kExperts}), Tensor(kF32, {0})},
           {Tensor(kF32, {kTokens, kExperts}), Tensor(kPred, {kTokens, kExperts}),
            Tensor(kF32, {kTokens, kExperts})},
           forward_options(1)},
          [](const Program& p) {
            const Tensor& x = p.operands[0];
            const auto score = [&](int64_t i) { return softmax_at(x, i); };
            expect_close(p.results[0], "probs",
                         [&](int64_t i) { return chosen(score, i) ? 3 * score(i) : 0.0; });
            expect_close(p.results[1], "map",
                         [&](int64_t i) { return chosen(score, i) ? 1.0 : 0.0; }, 0);
            expect_close(p.results[2], "saved", score);
          },
          {{set("score_function", 3), "score_function must be"},
           {set("routing_map_format", 2), "routing_map_format must ... got 2"},
           {set("topk", 0), "topk must be positive, got 0"},
           {set("topk", 9), "must not be above the number of experts, 8"},
           {set("group_topk", 3), "group_topk must divide topk, 2, got 3"},
           {[](Program& p) {
              p.attributes.at("group_topk") = 2;
              p.attributes.at("num_groups") = 1;
            },
            "num_groups must be at least group_topk, 2, got 1"},
           {[](Program& p) {
              p.attributes.at("group_topk") = 1;
              p.attributes.at("num_groups") = 3;
            },
            "must divide the number of experts, 8"},
           {[](Program& p) {
              p.attributes.at("group_topk") = 1;
              p.attributes.at("num_groups") = 8;
            },
            "must not be above the 1 experts of a group"},
           {operand(0, kF32, {}), "must be [tokens, experts]"},
           {operand(0, kS8, {kTokens, kExperts}), "logits must ... got int8"},
           {operand(1, kF32, {kExperts}), "must be empty, got float32[8]. Softmax has none"},
           {operand(1, kF32, {3}), "one for each expert, or none"},
           {operand(1, kS32, {kExperts}), "expert_bias must ... got int32"},
           {result(0, kBF16, {kTokens, kExperts}), "probs must ... got bfloat16"},
           {result(0, kF32, {kExperts}), "probs must have 40 numbers, as logits, got float32[8]"},
           {result(1, kS8, {kTokens, kExperts}), "must be of: bool, uint8"},
           {result(1, kPred, {kTokens}), "one for each expert"},
           {[](Program& p) { p.attributes.at("routing_map_format") = 1; }, "must be of: uint8"},
           {[](Program& p) {
              p.attributes.at("routing_map_format") = 1;
              p.results[1] = Tensor(kU8, {kTokens, kExperts});
            },
            "a bit for each expert"},
           {result(2, kF32, {kExperts}), "intermediate_output must ... got float32[8]"}}};
}

// Sigmoid: the bias, which isn't part of the probabilities, chooses.
CASE(router_with_a_bias) {
  Program program{"te_ffi_kernels.fused_topk_with_score_function_forward",
                  {normal({kTokens, kExperts}), normal({kExperts}, kBF16)},
                  {Tensor(kF32, {kTokens, kExperts}), Tensor(kU8, {kTokens, 1}),
                   Tensor(kF32, {kTokens, kExperts})},
                  forward_options(0)};
  program.attributes.at("routing_map_format") = 1;
  return {program,
          [](const Program& p) {
            const auto score = [&](int64_t i) { return 1 / (1 + std::exp(-number(p.operands[0], i))); };
            const auto biased = [&](int64_t i) { return score(i) + number(p.operands[1], i % kExperts); };
            bool good = true;
            for (int64_t i = 0; i < kTokens * kExperts; ++i) {
              const bool bit = p.results[1].as<uint8_t>()[i / 8] >> (i % 8) & 1;
              good = good && bit == chosen(biased, i);
            }
            CHECK(good);
            expect_close(p.results[2], "saved", score);
          },
          {}};
}

CASE(router_gradient) {
  Program program{"te_ffi_kernels.fused_topk_with_score_function_backward",
                  {Tensor(kPred, {kTokens, kExperts}), Tensor(kF32, {kTokens, kExperts}),
                   normal({kTokens, kExperts})},
                  {Tensor(kF32, {kTokens, kExperts})},
                  options(1, true)};
  const Tensor logits = normal({kTokens, kExperts});
  for (int64_t i = 0; i < logits.size(); ++i) {
    set_number(program.operands[1], i, softmax_at(logits, i));
  }
  return {program,
          [](const Program& p) {
            const Tensor &s = p.operands[1], &grad = p.operands[2];
            expect_close(p.results[0], "gradient of softmax", [&](int64_t i) {
              double along = 0;
              for (int64_t j = i / kExperts * kExperts; j < (i / kExperts + 1) * kExperts; ++j) {
                along += number(s, j) * number(grad, j);
              }
              return number(s, i) * (number(grad, i) - along);
            });
          },
          {{set("topk", -1), "topk must ... got -1"},
           {operand(2, kS8, {kTokens, kExperts}), "grad_probs must ... got int8"},
           {operand(1, kF32, {kTokens}), "intermediate_output must ... got float32[5]"},
           {operand(1, kF16, {kTokens, kExperts}), "intermediate_output must ... got float16"},
           {[](Program& p) {
              p.attributes.at("compute_aux_scores") = 0;
              p.operands[0] = Tensor(kPred, {3});
            },
            "routing_map must ... got bool[3]"},
           {result(0, kF32, {kTokens}), "as grad_probs"},
           {result(0, kBF16, {kTokens, kExperts}), "grad_logits must ... got bfloat16"}}};
}

CASE(router_loss) {
  return {{"te_ffi_kernels.fused_moe_aux_loss_forward",
           {normal({2, kTokens, kExperts}), filled(kS32, {2, kExperts}, 7)},
           {Tensor(kF32, {2}), Tensor(kF32, {2, 2})},
           {{"topk", 2}, {"coeff", 0.01}}},
          [](const Program& p) {
            const double factor = kExperts * 0.01 / 2 / kTokens / kTokens;
            const auto loss = [&](int64_t batch) {
              double sum = 0;
              for (int64_t i = 0; i < kTokens * kExperts; ++i) {
                sum += number(p.operands[0], batch * kTokens * kExperts + i);
              }
              return 7 * factor * sum;
            };
            expect_close(p.results[0], "loss", loss);
            expect_close(p.results[1], "coefficient and loss",
                         [&](int64_t i) { return i % 2 == 0 ? factor : loss(i / 2); });
          },
          {{set("topk", 0), "topk must be positive, got 0"},
           {operand(0, kF32, {kExperts}), "probs must be [tokens, experts], got float32[8]"},
           {operand(0, kS8, {2, kTokens, kExperts}), "probs must ... got int8"},
           {operand(1, kS32, {kExperts}), "one for each expert"},
           {operand(1, kS8, {2, kExperts}), "tokens_per_expert must ... got int8"},
           {result(0, kF32, {1}), "the loss"},
           {result(0, kBF16, {2}), "aux_loss must ... got bfloat16"},
           {result(1, kF32, {2}), "the coefficient, and the loss"}}};
}

CASE(router_loss_gradient) {
  return {{"te_ffi_kernels.fused_moe_aux_loss_backward",
           {normal({2, 2}), normal({2, kExperts}, kBF16), normal({2})},
           {Tensor(kF32, {2, kTokens, kExperts})},
           {}},
          [](const Program& p) {
            expect_close(p.results[0], "gradient", [&](int64_t i) {
              const int64_t batch = i / (kTokens * kExperts);
              return number(p.operands[0], 2 * batch) * number(p.operands[2], batch) *
                     number(p.operands[1], batch * kExperts + i % kExperts);
            });
          },
          {{operand(0, kF32, {2}), "const_buf must have 4 numbers"},
           {operand(1, kU8, {2, kExperts}), "tokens_per_expert must ... got uint8"},
           {operand(2, kF32, {1}), "the gradient of the loss"},
           {operand(2, kBF16, {2}), "grad_aux_loss must ... got bfloat16"},
           {result(0, kF32, {kExperts}), "grad_probs must be"}}};
}

}  // namespace
