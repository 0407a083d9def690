// What one instruction set offers to attention: parts of the work, each for one thread.
#pragma once

#include <cstdint>

#include "attention/attention.h"

namespace jaxtap::attention {

// Queries of all heads that share a head of keys: row r is query r / group of head r % group.
struct Part {
  Segment segment;
  int64_t kv_head = 0;
  int64_t begin = 0, end = 0;  // rows
};

// Sums of backward over the rows of a part, in float32.
struct KeySums {
  float* k = nullptr;  // [kv_length][padded qk_size]
  float* v = nullptr;  // [kv_length][padded v_size]
  float* sink = nullptr;  // [group], added to
};

struct Table {
  int width;      // sizes are padded to a multiple of it
  int columns;    // the rows of parts begin at a multiple of it
  int forward_rows, backward_rows;  // a part has no more rows

  // Scratch memory, in floats.
  int64_t (*forward_scratch)(const Problem& problem);
  int64_t (*backward_scratch)(const Problem& problem);
  int64_t (*bias_grad_scratch)(const Problem& problem);

  void (*forward)(const Problem& problem, const Part& part, float* scratch);
  // Adds to `sums`, and writes the gradient of the queries.
  void (*backward)(const Problem& problem, const Gradients& gradients, const Part& part,
                   const KeySums& sums, float* scratch);
  // The same of bfloat16 alone, where the processor multiplies that; nullptr elsewhere. Forward needs
  // a positive scale.
  void (*forward_bf16)(const Problem& problem, const Part& part, float* scratch);
  int64_t (*backward_bf16_scratch)(const Problem& problem);
  void (*backward_bf16)(const Problem& problem, const Gradients& gradients, const Part& part,
                        const KeySums& sums, float* scratch);

  // sum * factor as gradients of the keys' tokens; `rows` of them, from `token` on.
  void (*store)(const Problem& problem, const Tokens& to, int64_t head, int64_t token, int64_t rows,
                int64_t size, const float* sums, float factor);
  void (*add)(const float* from, float* to, int64_t count);
  // Queries [begin, begin + columns) of the gradient of a bias, at a batch and a head of its own.
  void (*bias_grad)(const Problem& problem, const Gradients& gradients, int64_t batch, int64_t head,
                    int64_t begin, float* scratch);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::attention
