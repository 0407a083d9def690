// Activations of the rows of a matrix, plain or gated, and their gradients, as numbers that
// te::quantize asks for.
#pragma once

#include <cstdint>

#include "activations/activation.h"
#include "activations/table.h"
#include "te/quantize.h"

namespace jaxtap::activations {

struct Operands {
  Activation activation;
  Params params;
  const void* dz = nullptr;  // [rows, cols]; gradients alone
  const void* x = nullptr;   // [rows, cols], or gated [rows, 2, cols]
  te::Float dtype = te::Float::kF32;
  int64_t cols = 0;
};

// [rows, cols].
class Activated : public te::Source {
 public:
  explicit Activated(const Operands& operands) : operands_(operands) {}

  void load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
            int64_t stride) const override;

 private:
  const Operands& operands_;
};

// dx, in the shape of x.
class Derived : public te::Source {
 public:
  explicit Derived(const Operands& operands) : operands_(operands) {}

  void load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
            int64_t stride) const override;
  int64_t width() const override;

 private:
  // Columns [col, col + cols) of both parts of dx; nullptr where one isn't wanted.
  void pair(int64_t row, int64_t col, int64_t cols, float* da, float* db) const;

  const Operands& operands_;
};

}  // namespace jaxtap::activations
