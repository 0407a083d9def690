#include <algorithm>

#include "common/arena.h"
#include "common/isa_table.h"
#include "norms/norms.h"
#include "norms/table.h"
#include "norms/weights.h"
#include "te/table.h"

namespace jaxtap::norms {

struct Normalized::Rows {
  Moments moments;
};

namespace {

struct OfRows {};
struct Gamma {};
struct Beta {};

const char* at(const Norm& norm, int64_t row, int64_t col) {
  const int64_t bytes = te::bytes_of(norm.dtype);
  return static_cast<const char*>(norm.x) + (row * norm.cols + col) * bytes;
}

}  // namespace

Normalized::Normalized(const Norm& norm, bool cut, const Parallel& parallel)
    : norm_(norm),
      gamma_(weights<Gamma>(norm.gamma, norm.weights, norm.cols, norm.zero_centered)),
      beta_(norm.kind == Kind::kRms ? nullptr
                                    : weights<Beta>(norm.beta, norm.weights, norm.cols, false)),
      rows_(Arena<OfRows>::get_array<Rows>(norm.rows)) {
  if (!cut) return;
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, norm.cols));
  parallel.ranges(norm.rows, grain, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) begin(row);
  });
}

void Normalized::begin(int64_t row) const {
  const Table& table = norms::table();
  const int dtype = static_cast<int>(norm_.dtype);
  const auto* of = norm_.kind == Kind::kRms ? table.rms : table.layer;
  const Moments moments = of[dtype](at(norm_, row, 0), norm_.cols, norm_.epsilon);
  rows_[row].moments = moments;
  norm_.rsigma[row] = moments.rsigma;
  if (norm_.kind == Kind::kLayer) norm_.mean[row] = moments.mean + moments.rest;
}

void Normalized::load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* out,
                      int64_t stride) const {
  const Table& table = norms::table();
  for (int64_t i = 0; i < rows; ++i) {
    table.apply[static_cast<int>(norm_.dtype)](at(norm_, row + i, col), cols,
                                               rows_[row + i].moments, gamma_ + col,
                                               beta_ == nullptr ? nullptr : beta_ + col,
                                               out + i * stride);
  }
}

}  // namespace jaxtap::norms

JAXTAP_DEFINE_TABLE(norms)
