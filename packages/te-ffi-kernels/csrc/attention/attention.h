// Attention, forward and backward, of queries, keys and values that are read block by block: no
// array of (queries x keys) is made, but what the caller gives or asks for.
//
// The method is that of Dao et al. 2022, "FlashAttention". A block of scores is computed with keys
// along its rows and queries along its columns, so that what a softmax reduces is reduced from
// register to register, and a block of probabilities is already a factor of the next matmul.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/forward.h"

namespace jaxtap::attention {

// The numbers are Transformer Engine's.
enum class Bias { kNone = 0, kPreScale = 1, kPostScale = 2 };

// Numbers of a token's heads: at data + token * token_stride + head * head_stride, in elements.
struct Tokens {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
};

// Queries that see each other's keys, and nobody else's. Tokens are counted over the whole array.
struct Segment {
  int64_t q_start = 0, q_length = 0;
  int64_t kv_start = 0, kv_length = 0;
  int64_t batch = 0;      // for the bias
  int64_t number = 0;     // for the random numbers of dropout
  int64_t aux_start = 0;  // where the log-sum-exp of its first query is, of the first head
};

struct Problem {
  DType dtype = DType::F32;  // F32, BF16 or F16: of all but what is declared as float here
  int64_t segments = 0;
  // Of number i. Called from several threads.
  Segment (*segment)(const void* context, int64_t i) = nullptr;
  const void* context = nullptr;
  int64_t most_queries = 0, most_keys = 0;  // of a segment

  int64_t q_heads = 0, kv_heads = 0;  // q_heads is a multiple of kv_heads
  int64_t qk_size = 0, v_size = 0;    // of a head
  Tokens q, k, v, out;
  float scale = 1;

  Bias bias_type = Bias::kNone;
  const void* bias = nullptr;  // [batches][heads][most_queries][most_keys]
  int64_t bias_batches = 1, bias_heads = 1;

  // Query i sees key j where j - i - shift is within [-left, right]; -1: without end. The shift is
  // 0, or keys - queries of the segment.
  int64_t left = -1, right = -1;
  bool bottom_right = false;

  const float* sink = nullptr;  // [q_heads] or none: a score that takes part in each softmax's sum

  // The natural logarithm of each softmax's sum; -inf without any key.
  float* aux = nullptr;
  int64_t aux_token_stride = 1, aux_head_stride = 1;

  float dropout = 0;  // the probability of 0, below 1
  uint32_t seed[2] = {0, 0};
  uint32_t offset = 0;

  int64_t group() const { return q_heads / kv_heads; }
};

// Writes `out` and `aux` of all queries in segments.
void forward(const Problem& problem, const Parallel& parallel, Isa isa = selected_isa());

// What backward needs and writes. Gradients of tokens outside of segments are not written.
struct Gradients {
  Tokens out_grad;
  Tokens q_grad, k_grad, v_grad;
  void* bias_grad = nullptr;   // as the bias; all of it is written
  float* sink_grad = nullptr;  // [q_heads]
};

// `problem.out` and `problem.aux` are what forward gave. The result does not depend on `parallel`.
void backward(const Problem& problem, const Gradients& gradients, const Parallel& parallel,
              Isa isa = selected_isa());

}  // namespace jaxtap::attention
