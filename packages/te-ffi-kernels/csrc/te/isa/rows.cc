// Loops over rows of float32.

#include "te/isa/formats.h"
#include "te/isa/table.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

int32_t absmax(const float* __restrict in, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = magnitude(in[i]);
    most = bits > most ? bits : most;
  }
  return without_subnormal(most);
}

void absmax_each(const float* __restrict in, int32_t* __restrict most, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = magnitude(in[i]);
    most[i] = bits > most[i] ? bits : most[i];
  }
}

void add(const float* __restrict in, float* __restrict sum, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += in[i];
}

void multiply(float* row, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) row[i] *= factor;
}

void multiply_each(float* __restrict row, int64_t count, const float* __restrict factors) {
  for (int64_t i = 0; i < count; ++i) row[i] *= factors[i];
}

void scale_blocks(float* __restrict row, int64_t count, const uint8_t* __restrict scales) {
  for (int64_t block = 0; block < count / kBlock; ++block) {
    const Power by = power(scales[block]);
    float* __restrict at = row + block * kBlock;
    for (int i = 0; i < kBlock; ++i) at[i] = at[i] * by.factor * by.half;
  }
}

void scale_columns(float* __restrict row, int64_t count, const uint8_t* __restrict scales) {
  for (int64_t i = 0; i < count; ++i) {
    const Power by = power(scales[i]);
    row[i] = row[i] * by.factor * by.half;
  }
}

}  // namespace

void set_rows(Table& table) {
  table.absmax = absmax;
  table.absmax_each = absmax_each;
  table.add = add;
  table.multiply = multiply;
  table.multiply_each = multiply_each;
  table.scale_blocks = scale_blocks;
  table.scale_columns = scale_columns;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
