// Fake quantization of a tensor to the average of its ranges: extremes, their average, and
// rounding, in one call.
#pragma once

#include <cstdint>

#include "common/parallel.h"
#include "fakequant/table.h"
#include "te/modes.h"

namespace jaxtap::fakequant {

struct Options {
  int bits = 8;           // of the integers
  bool symmetric = true;  // ranges [-upper, upper], without a zero point
  bool observe = false;   // the range of x counts, and is seen from now on
  bool join = false;      // together with what was seen
  float share = 1.0f;     // of one more range in the sums
};

// Sums and weights of the lower and the upper bounds of earlier ranges: as they are with one more,
// and without; and how many there are.
struct Terms {
  float sum[2], weight[2], sum_before[2], weight_before[2], count[2];
};
static_assert(sizeof(Terms) == 40, "a row of float32[rows, 5, 2]");

struct Args {
  Options options;
  int64_t indices = 0;  // of the batch axes: each has its extremes, and the mean of them counts
  int64_t numbers = 0;  // at each index
  te::Float dtype = te::Float::kF32;
  const void* x = nullptr;
  const Terms* terms = nullptr;
  const float* seen = nullptr;  // [2]; not finite where nothing was seen; or nullptr
  void* out = nullptr;
  // Where x is within the bounds: the derivative, a bit for each number. x is [blocks, rows,
  // columns] to it, and `inside` [blocks, rows / 8 rounded up, columns]: eight rows share bytes,
  // the first has the lowest bit.
  uint8_t* inside = nullptr;
  int64_t blocks = 1, rows = 1, columns = 0;
  float* bounds = nullptr;    // [2]: the average, to which x is rounded
  float* observed = nullptr;  // [2], where options.observe; may be `seen`
};

// x is read twice where its own range matters, else once. NaN stays NaN, and a range with NaN or
// infinity counts on neither side that isn't finite.
void fake_quantize(const Args& args, const Parallel& parallel);

}  // namespace jaxtap::fakequant
