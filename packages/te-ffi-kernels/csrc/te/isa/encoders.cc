// float32 to quantized values.

#include "te/isa/formats.h"
#include "te/isa/table.h"

namespace jaxtap::te::JAXTAP_ISA_NAMESPACE {
namespace {

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

template <class Format>
void set(Table& table, QType qtype) {
  const int at = static_cast<int>(qtype);
  table.encode[at] = encode<Format>;
  table.encode_each[at] = encode_each<Format>;
  table.encode_blocks[at] = encode_blocks<Format>;
  table.encode_times_each[at] = encode_times_each<Format>;
  table.block_scales[at] = block_scales<Format>;
}

}  // namespace

void set_encoders(Table& table) {
  set<E4M3>(table, QType::kE4M3);
  set<E5M2>(table, QType::kE5M2);
  set<Int8>(table, QType::kInt8);
}

}  // namespace jaxtap::te::JAXTAP_ISA_NAMESPACE
