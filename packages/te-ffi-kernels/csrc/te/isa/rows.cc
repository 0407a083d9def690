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

// e^x for x <= 0, to about 2 units in the last place: 2^n times a polynomial of the rest (Taylor's,
// to the 7th power, on |rest| <= ln(2) / 2).
inline __attribute__((always_inline)) float exp_negative(float x) {
  const float low = x > -87.0f ? x : -87.0f;
  const float shifted = low * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float rest = (low - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * rest + 1.0f / 720;
  p = p * rest + 1.0f / 120;
  p = p * rest + 1.0f / 24;
  p = p * rest + 1.0f / 6;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  const uint32_t exponent = (float_bits(shifted) - 0x4b400000u + 127u) << 23;
  return p * bits_float(exponent);
}

constexpr float kRoot = 0.7978845608f;  // sqrt(2 / pi)

// 1 / (1 + e^(-2 u)), which is (1 + tanh u) / 2.
inline __attribute__((always_inline)) float gate(float x) {
  const float u = kRoot * (x + 0.044715f * x * x * x);
  const float size = u < 0 ? -u : u;
  const float e = exp_negative(-2.0f * size);
  const float positive = 1.0f / (1.0f + e);
  const float value = u < 0 ? e * positive : positive;
  return u == u ? value : u;
}

void gelu(float* row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = row[i];
    const float g = gate(x);
    row[i] = g == 0.0f ? 0.0f : x * g;  // the limit for -inf
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
  table.gelu = gelu;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
