// Loops over rows: arrays to float32 and back, float32 to quantized values, and what is done to rows
// of float32.

#include "te/isa/formats.h"
#include "te/isa/table.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

template <class Format>
void load(const void* in, float* __restrict out, int64_t count) {
  const auto* __restrict from = static_cast<const typename Format::Type*>(in);
  for (int64_t i = 0; i < count; ++i) out[i] = Format::load(from[i]);
}

template <class Format>
void store(const float* __restrict in, void* out, int64_t count) {
  auto* __restrict to = static_cast<typename Format::Type*>(out);
  for (int64_t i = 0; i < count; ++i) to[i] = Format::store(in[i]);
}

template <class Format>
void decode(const uint8_t* __restrict in, float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = Format::decode(in[i]);
}

template <class Format>
void encode(const float* __restrict in, uint8_t* __restrict out, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) out[i] = Format::encode(in[i] * factor);
}

template <class Format>
void encode_each(const float* __restrict in, uint8_t* __restrict out, int64_t count,
                 const float* __restrict factors) {
  for (int64_t i = 0; i < count; ++i) out[i] = Format::encode(in[i] * factors[i]);
}

template <class Format>
void block_scales(const int32_t* __restrict absmax, int64_t count, uint8_t* __restrict scales,
                  float* __restrict factors, float* __restrict halves) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t scale = block_scale<Format>(absmax[i]);
    const Power by = inverse(scale);
    scales[i] = static_cast<uint8_t>(scale);
    factors[i] = by.factor;
    halves[i] = by.half;
  }
}

// Some blocks at a time, in three loops that are vector code each.
constexpr int kBlocks = 32;

template <class Format>
void encode_blocks(const float* __restrict in, uint8_t* __restrict out, int64_t count,
                   uint8_t* __restrict scales) {
  int32_t most[kBlocks];
  float factors[kBlocks], halves[kBlocks];
  for (int64_t first = 0; first < count / kBlock; first += kBlocks) {
    const int64_t rest = count / kBlock - first;
    const int64_t blocks = rest < kBlocks ? rest : kBlocks;
    for (int64_t b = 0; b < blocks; ++b) {
      const float* __restrict from = in + (first + b) * kBlock;
      int32_t absmax = 0;
      for (int i = 0; i < kBlock; ++i) {
        const int32_t bits = magnitude(from[i]);
        absmax = bits > absmax ? bits : absmax;
      }
      most[b] = absmax;
    }
    block_scales<Format>(most, blocks, scales + first, factors, halves);
    for (int64_t b = 0; b < blocks; ++b) {
      const float* __restrict from = in + (first + b) * kBlock;
      uint8_t* __restrict to = out + (first + b) * kBlock;
      const float factor = factors[b], half = halves[b];
      for (int i = 0; i < kBlock; ++i) to[i] = Format::encode(from[i] * factor * half);
    }
  }
}

template <class Format>
void encode_times_each(const float* __restrict in, uint8_t* __restrict out, int64_t count,
                       const float* __restrict factors, const float* __restrict halves) {
  for (int64_t i = 0; i < count; ++i) out[i] = Format::encode(in[i] * factors[i] * halves[i]);
}

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

template <class Format>
void set_floats(Table& table, Float dtype) {
  const int at = static_cast<int>(dtype);
  table.load[at] = load<Format>;
  table.store[at] = store<Format>;
}

template <class Format>
void set_qvalues(Table& table, QType qtype) {
  const int at = static_cast<int>(qtype);
  table.decode[at] = decode<Format>;
  table.encode[at] = encode<Format>;
  table.encode_each[at] = encode_each<Format>;
  table.encode_blocks[at] = encode_blocks<Format>;
  table.encode_times_each[at] = encode_times_each<Format>;
  table.block_scales[at] = block_scales<Format>;
}

}  // namespace

const Table& make_table() {
  static const Table table = [] {
    Table made{};
    set_floats<F32>(made, Float::kF32);
    set_floats<BF16>(made, Float::kBF16);
    set_floats<F16>(made, Float::kF16);
    set_qvalues<E4M3>(made, QType::kE4M3);
    set_qvalues<E5M2>(made, QType::kE5M2);
    set_qvalues<Int8>(made, QType::kInt8);
    made.absmax = absmax;
    made.absmax_each = absmax_each;
    made.add = add;
    made.multiply = multiply;
    made.multiply_each = multiply_each;
    made.scale_blocks = scale_blocks;
    made.scale_columns = scale_columns;
    set_transpose(made);
    set_matmul(made);
    return made;
  }();
  return table;
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
