// What one instruction set offers to the norms: loops over a row. Each is compiled once per
// instruction set (norms/isa), and reached through the table of the one that was chosen.
//
// Sums are over a fixed number of lanes, and nothing is fused: results have the same bits on every
// instruction set.
#pragma once

#include <cstdint>

namespace jaxtap::norms {

// Of a row. Its mean is the sum of both parts, of which the second is what rounding took from the
// first; `rsigma` is one over the square root of variance (or mean square) and epsilon.
struct Moments {
  float mean, rest;
  float rsigma;
};

// Some columns of rows, in float32, as the backward loops take them.
struct Part {
  const float* dz;
  const float* x;
  int64_t stride;  // of both
  const float* mean;
  const float* rsigma;
  const float* first;   // mean of dz * gamma of a row
  const float* second;  // mean of dz * gamma * normalized x of a row
  const float* gamma;
  int64_t rows, cols;
};

struct Table {
  // Of n numbers. The index is a te::Float.
  Moments (*layer[3])(const void* x, int64_t n, float epsilon);
  Moments (*rms[3])(const void* x, int64_t n, float epsilon);

  // (x - mean) * rsigma * gamma + beta, the last where it isn't nullptr.
  void (*apply[3])(const void* x, int64_t n, const Moments& moments, const float* gamma,
                   const float* beta, float* out);

  // Means over n columns of dz * gamma, and of that times (x - mean) * rsigma.
  void (*means)(const float* dz, const float* x, int64_t n, float mean, float rsigma,
                const float* gamma, float* first, float* second);

  // dx [rows][stride] of rsigma * (dz * gamma - first - normalized * second); adds the sums over
  // rows of dz * normalized and, where it isn't nullptr, of dz.
  void (*backward)(const Part& part, float* dx, int64_t stride, float* dgamma, float* dbeta);
};

// The table of the instruction set that selected_isa() names. Throws as that.
const Table& table();

}  // namespace jaxtap::norms
