// What one instruction set offers to attention: parts of the work, each for one thread.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "common/forward.h"

namespace jaxtap::attention {

// Queries of all heads that share a head of keys: row r is query r / group of head r % group.
struct Part {
  Segment segment;
  int64_t kv_head = 0;
  int64_t begin = 0, end = 0;  // rows
  const Part* next = nullptr;  // what this thread does then, if that is known
};

constexpr int64_t kBlock = 64;  // keys that are worked on at a time

// Sums of backward over the rows of a part, in float32: of whole blocks of keys, [keys][width].
// Widths are sizes, padded to a multiple of 16.
struct KeySums {
  float* k = nullptr;
  float* v = nullptr;
  int64_t k_width = 0, v_width = 0;
  float* sink = nullptr;  // [group], added to
};

// A way to compute; its functions are nullptr where there is none. Scratch memory is in floats.
struct Method {
  int64_t (*forward_scratch)(const Problem& problem);
  void (*forward)(const Problem& problem, const Part& part, float* scratch);
  int64_t (*backward_scratch)(const Problem& problem);
  // Adds to `sums`, and writes the gradient of the queries.
  void (*backward)(const Problem& problem, const Gradients& gradients, const Part& part,
                   const KeySums& sums, float* scratch);
};

struct Table {
  int columns;  // the rows of parts begin at a multiple of it
  int forward_rows, backward_rows;  // a part has no more rows

  Method any;   // of all dtypes
  Method bf16;  // where the processor multiplies that. Forward needs a positive scale.

  // sum * factor as gradients of the keys' tokens; `rows` of them, from `token` on.
  void (*store)(const Problem& problem, const Tokens& to, int64_t head, int64_t token, int64_t rows,
                int64_t size, const float* sums, int64_t width, float factor);
  void (*add)(const float* from, float* to, int64_t count);
  int64_t (*bias_grad_scratch)(const Problem& problem);
  // Queries [begin, begin + columns) of the gradient of a bias, at a batch and a head of its own.
  void (*bias_grad)(const Problem& problem, const Gradients& gradients, int64_t batch, int64_t head,
                    int64_t begin, float* scratch);
};

const Table& table(Isa isa);

}  // namespace jaxtap::attention
