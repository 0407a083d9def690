// What one instruction set offers to attention over a cache: a stretch of positions at a time, for
// all queries of a head of keys. Numbers outside of the arrays are never read or written.
#pragma once

#include <cstdint>

namespace jaxtap::decode {

// Positions that are read at a time.
constexpr int64_t kBlock = 64;

// Whole vectors of any instruction set.
constexpr int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

// Of the rows of a stretch, which are the queries and the heads that share keys.
struct Partial {
  float* most;     // [rows]: largest logit, -infinity where nothing was seen
  float* sums;     // [rows]: of exp(logit - most)
  float* totals;   // [rows, padded(size)]: of exp(logit - most) * value
};

struct Stretch {
  const float* q;  // [rows, padded(size)], scaled; zeros beyond the size
  int64_t rows;
  int64_t size;
  const void* keys;    // [positions, size], from position 0 on
  const void* values;  // the same
  const float* key_scales;    // [positions], or null
  const float* value_scales;  // the same
  int64_t step;  // from position to position, in rows of keys and in scales
  int64_t begin, end;         // the positions
  const int64_t* first;       // [rows]: the first position that is seen
  const int64_t* last;        // [rows]: the one after the last
  const uint8_t* const* masks;  // [rows] of bool[positions], or null
  float softcap;
  float* scratch;  // [scratch_of(rows)]
  Partial out;
};

constexpr int64_t scratch_of(int64_t rows) { return rows * kBlock + kBlock; }

struct Table {
  void (*attend[4])(const Stretch&);  // by format: float32, bfloat16, float16, int8
  // A row of floats of one of the first three formats, times a number, padded with zeros.
  void (*scaled[3])(const void* from, float scale, int64_t size, float* to);
  // Parts of a row, put together and stored: `stride` rows apart.
  void (*finish[3])(const Partial& first, int64_t parts, int64_t stride, int64_t size, void* out);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::decode
