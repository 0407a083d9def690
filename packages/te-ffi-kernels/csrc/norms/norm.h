// What a norm of the rows of a matrix and its gradient are given, whatever computes them.
#pragma once

#include <cstdint>

#include "common/error.h"
#include "te/table.h"

namespace jaxtap::norms {

// With Transformer Engine's numbers.
enum class Kind : int64_t { kLayer = 0, kRms = 1 };

// Throws for other numbers.
inline Kind kind_of(int64_t value) {
  if (value != 0 && value != 1) {
    throw invalid_argument("norm_type must be 0 (layer norm) or 1 (RMS norm), got ", value);
  }
  return static_cast<Kind>(value);
}

struct Norm {
  Kind kind = Kind::kLayer;
  bool zero_centered = false;  // whether what is multiplied with is 1 + gamma
  float epsilon = 0.0f;
  const void* x = nullptr;  // [rows, cols]
  te::Float dtype = te::Float::kF32;
  const void* gamma = nullptr;  // [cols]
  const void* beta = nullptr;   // [cols]; not read for RMS
  te::Float weights = te::Float::kF32;
  int64_t rows = 0, cols = 0;

  float* mean = nullptr;    // [rows]; nullptr for RMS
  float* rsigma = nullptr;  // [rows]
};

struct Gradient {
  Kind kind = Kind::kLayer;
  bool zero_centered = false;
  const void* dz = nullptr;  // [rows, cols]
  const void* x = nullptr;   // [rows, cols]
  te::Float dtype = te::Float::kF32;
  const float* mean = nullptr;    // [rows]; not read for RMS
  const float* rsigma = nullptr;  // [rows]
  const void* gamma = nullptr;    // [cols]
  te::Float weights = te::Float::kF32;
  int64_t rows = 0, cols = 0;

  void* dx = nullptr;      // [rows, cols], of `dtype`
  void* dgamma = nullptr;  // [cols], of `weights`
  void* dbeta = nullptr;   // [cols], of `weights`; not written for RMS
};

}  // namespace jaxtap::norms
