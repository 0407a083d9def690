// What one instruction set offers to the activations: loops over a row of float32. Each is compiled
// once per instruction set (activations/isa), and reached through the table of the one that was
// chosen.
#pragma once

#include <cstdint>

namespace jaxtap::activations {

// What is done to x, or with a gate to the first of its two parts; also the index into the tables.
enum class Function {
  kGelu = 0,  // in its form with tanh
  kSigmoid,
  kSilu,
  kRelu,
  kQuickGelu,  // x * sigmoid(1.702 x)
  kSquaredRelu,
  kClampedSilu,  // x * sigmoid(alpha x), of min(x, limit)
};
constexpr int kFunctions = 7;

// Of kClampedSilu. The second part is cut to [-limit, limit], and `offset` is added.
struct Params {
  float limit = 7.0f;
  float alpha = 1.702f;
  float offset = 1.0f;
};

struct Table {
  void (*forward[kFunctions])(const float* x, float* out, int64_t n, const Params& params);
  // out = f(a) * b
  void (*gated[kFunctions])(const float* a, const float* b, float* out, int64_t n,
                            const Params& params);
  void (*backward[kFunctions])(const float* dz, const float* x, float* dx, int64_t n,
                               const Params& params);
  void (*gated_backward[kFunctions])(const float* dz, const float* a, const float* b, float* da,
                                     float* db, int64_t n, const Params& params);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::activations
