#include "activations/activations.h"

#include <algorithm>

#include "common/isa_table.h"
#include "te/table.h"

namespace jaxtap::activations {
namespace {

constexpr int64_t kStep = 512;

// Numbers as float32: where they are, or in `to`.
const float* numbers(const void* from, te::Float dtype, int64_t at, int64_t count, float* to) {
  if (dtype == te::Float::kF32) return static_cast<const float*>(from) + at;
  te::table().load[static_cast<int>(dtype)](static_cast<const uint16_t*>(from) + at, to, count);
  return to;
}

}  // namespace

void Activated::load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
                     int64_t stride) const {
  const Table& table = activations::table();
  const Operands& given = operands_;
  const int function = static_cast<int>(given.activation.function);
  const bool gated = given.activation.gated;
  float first[kStep], second[kStep];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t line = (row + i) * given.cols * (gated ? 2 : 1) + col;
    for (int64_t j = 0; j < cols; j += kStep) {
      const int64_t count = std::min(kStep, cols - j);
      const float* a = numbers(given.x, given.dtype, line + j, count, first);
      float* to = out + i * stride + j;
      if (gated) {
        const float* b = numbers(given.x, given.dtype, line + given.cols + j, count, second);
        table.gated[function](a, b, to, count, given.params);
      } else {
        table.forward[function](a, to, count, given.params);
      }
    }
  }
}

// Both parts of dx at once share what is computed.
int64_t Derived::width() const {
  return operands_.activation.gated ? std::max<int64_t>(1, 2 * operands_.cols)
                                    : te::Source::width();
}

void Derived::pair(int64_t row, int64_t col, int64_t cols, float* da, float* db) const {
  const Table& table = activations::table();
  const Operands& given = operands_;
  const int function = static_cast<int>(given.activation.function);
  const int64_t line = row * given.cols * 2 + col;
  float slopes[kStep], first[kStep], second[kStep], rest[kStep];
  for (int64_t j = 0; j < cols; j += kStep) {
    const int64_t count = std::min(kStep, cols - j);
    const float* dz = numbers(given.dz, given.dtype, row * given.cols + col + j, count, slopes);
    const float* a = numbers(given.x, given.dtype, line + j, count, first);
    const float* b = numbers(given.x, given.dtype, line + given.cols + j, count, second);
    table.gated_backward[function](dz, a, b, da == nullptr ? rest : da + j,
                                   db == nullptr ? rest : db + j, count, given.params);
  }
}

void Derived::load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
                   int64_t stride) const {
  const Operands& given = operands_;
  const int64_t n = given.cols;
  for (int64_t i = 0; i < rows; ++i) {
    float* to = out + i * stride;
    if (!given.activation.gated) {
      const Table& table = activations::table();
      float slopes[kStep], first[kStep];
      for (int64_t j = 0; j < cols; j += kStep) {
        const int64_t count = std::min(kStep, cols - j), at = (row + i) * n + col + j;
        table.backward[static_cast<int>(given.activation.function)](
            numbers(given.dz, given.dtype, at, count, slopes),
            numbers(given.x, given.dtype, at, count, first), to + j, count, given.params);
      }
    } else if (col == 0 && cols == 2 * n) {
      pair(row + i, 0, n, to, to + n);
    } else {
      const int64_t first = std::max<int64_t>(0, std::min(n, col + cols) - col);
      if (first > 0) pair(row + i, col, first, to, nullptr);
      if (first < cols) pair(row + i, col + first - n, cols - first, nullptr, to + first);
    }
  }
}

}  // namespace jaxtap::activations

JAXTAP_DEFINE_TABLE(activations)
