// What one instruction set offers to routers: a token at a time. Numbers outside of a token's
// arrays are never read or written, at any length and alignment.
#pragma once

#include <cstdint>

#include "router/router.h"

namespace jaxtap::router {

// Memory of a thread, for so many experts.
struct Scratch {
  static constexpr int64_t kSlack = 64;

  static int64_t floats(int64_t experts) { return 5 * (experts + kSlack); }

  Scratch(float* memory, int64_t experts)
      : scores(memory),
        ranked(memory + (experts + kSlack)),
        picked(memory + 2 * (experts + kSlack)),
        chosen(reinterpret_cast<int32_t*>(memory + 3 * (experts + kSlack))),
        members(reinterpret_cast<int32_t*>(memory + 4 * (experts + kSlack))) {}

  float *scores, *ranked, *picked;
  int32_t *chosen, *members;
};

struct Table {
  // Indexed by te::Float.
  void (*forward[3])(const Forward& args, int64_t token, const Scratch& scratch);
  // Indexed by te::Float and Score. `map` is a byte for each expert; none: all.
  void (*backward[3][3])(const Options& options, const uint8_t* map, const float* saved,
                         const void* grad, void* out);
  // sums[experts] += the rows.
  void (*add_rows[3])(const void* rows, int64_t count, int64_t experts, float* sums);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

// The indices of the k largest of n scores in `chosen`, ascending, for any k.
void select_any(const float* scores, int64_t n, int64_t k, int32_t* chosen);

}  // namespace jaxtap::router
