// The formats of arrays and quantized values as the CPU's kernels have them, with the instructions
// that GPUs have for them, which give the same bits; and vectors of numbers in memory.
#pragma once

#define JAXTAP_ISA_NAMESPACE device
#include "cuda/device.h"
#include "te/isa/formats.h"
#include "te/table.h"

namespace jaxtap::cuda {
namespace {

namespace quantized = ::jaxtap::te::device;
using quantized::E4M3;
using quantized::E5M2;
using quantized::F32;
using quantized::Int8;
using te::QType;

struct BF16 {
  using Type = uint16_t;
  JAXTAP_DEVICE float load(uint16_t x) { return bf16_to_f32(x); }
  JAXTAP_DEVICE uint16_t store(float x) {
#if defined(__CUDA_ARCH__)
    uint16_t out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
#else
    return f32_to_bf16(x);
#endif
  }
};

struct F16 {
  using Type = uint16_t;
  JAXTAP_DEVICE float load(uint16_t x) {
#if defined(__CUDA_ARCH__)
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
#else
    return f16_to_f32(x);
#endif
  }
  JAXTAP_DEVICE uint16_t store(float x) {
#if defined(__CUDA_ARCH__)
    uint16_t out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
#else
    return f32_to_f16(x);
#endif
  }
};

// Calls run(format) for the format of a dtype, which is known when a kernel is launched.
template <class Run>
void by_float(te::Float dtype, Run&& run) {
  switch (dtype) {
    case te::Float::kF32: return run(F32());
    case te::Float::kBF16: return run(BF16());
    case te::Float::kF16: return run(F16());
  }
}

// Numbers in 16 bytes.
template <class Format>
constexpr int kWide = 16 / static_cast<int>(sizeof(typename Format::Type));

// What a vector of so many bytes is aligned to: more than 16 are read in parts.
constexpr size_t alignment_of(size_t bytes) { return bytes < 16 ? bytes : 16; }

// kCount numbers in memory that's aligned to them.
template <typename T, int kCount>
struct alignas(alignment_of(sizeof(T) * kCount)) Vector {
  T at[kCount];
};

template <int kCount, typename T>
JAXTAP_DEVICE Vector<T, kCount> read(const T* from) {
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}

template <int kCount, typename T>
JAXTAP_DEVICE void write(T* to, const Vector<T, kCount>& numbers) {
  *reinterpret_cast<Vector<T, kCount>*>(to) = numbers;
}

// kCount numbers from `from` on, of which there are `left`; zeros beyond them. With `wide` there
// are all of them, and the address is aligned.
template <class Format, int kCount>
JAXTAP_DEVICE void load(const typename Format::Type* from, int64_t left, bool wide,
                        float (&out)[kCount]) {
  if (wide && left >= kCount) {
    const auto numbers = read<kCount>(from);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) out[i] = Format::load(numbers.at[i]);
  } else {
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) out[i] = i < left ? Format::load(from[i]) : 0.0f;
  }
}

template <class Format, int kCount>
JAXTAP_DEVICE void store(typename Format::Type* to, int64_t left, bool wide,
                         const float (&numbers)[kCount]) {
  if (wide && left >= kCount) {
    Vector<typename Format::Type, kCount> out;
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) out.at[i] = Format::store(numbers[i]);
    write<kCount>(to, out);
  } else {
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (i < left) to[i] = Format::store(numbers[i]);
    }
  }
}

// One number of an array whose dtype is known when the kernel runs.
JAXTAP_DEVICE float number_at(const void* array, te::Float dtype, int64_t at) {
  switch (dtype) {
    case te::Float::kF32: return static_cast<const float*>(array)[at];
    case te::Float::kBF16: return BF16::load(static_cast<const uint16_t*>(array)[at]);
    default: return F16::load(static_cast<const uint16_t*>(array)[at]);
  }
}

JAXTAP_DEVICE void store_one(te::Float dtype, void* y, int64_t at, float value) {
  switch (dtype) {
    case te::Float::kF32: static_cast<float*>(y)[at] = value; break;
    case te::Float::kBF16: static_cast<uint16_t*>(y)[at] = BF16::store(value); break;
    case te::Float::kF16: static_cast<uint16_t*>(y)[at] = F16::store(value); break;
  }
}

// Quantized values of four numbers, the first in the lowest byte.
template <class Format>
JAXTAP_DEVICE uint32_t encode_four_by_bits(const float (&x)[4]) {
  uint32_t out = 0;
  JAXTAP_UNROLL
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(Format::encode(x[i])) << (8 * i);
  return out;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define JAXTAP_ENCODE_FOUR(FORMAT)                                                              \
  uint16_t low, high;                                                                           \
  asm("cvt.rn.satfinite." FORMAT ".f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));        \
  asm("cvt.rn.satfinite." FORMAT ".f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));       \
  return low | static_cast<uint32_t>(high) << 16;
#endif

JAXTAP_DEVICE uint32_t encode_four(QType qtype, const float (&x)[4]) {
  switch (qtype) {
    case QType::kE4M3: {
#if defined(JAXTAP_ENCODE_FOUR)
      JAXTAP_ENCODE_FOUR("e4m3x2")
#else
      return encode_four_by_bits<E4M3>(x);
#endif
    }
    case QType::kE5M2: {
#if defined(JAXTAP_ENCODE_FOUR)
      JAXTAP_ENCODE_FOUR("e5m2x2")
#else
      return encode_four_by_bits<E5M2>(x);
#endif
    }
    default:
      return encode_four_by_bits<Int8>(x);
  }
}

JAXTAP_DEVICE float decode(QType qtype, uint8_t x) {
  return qtype == QType::kE4M3 ? E4M3::decode(x) : qtype == QType::kE5M2 ? E5M2::decode(x)
                                                                       : Int8::decode(x);
}

// Bits of |x|; 0 for NaN and subnormal numbers.
JAXTAP_DEVICE int magnitude(float x) {
  return quantized::without_subnormal(quantized::magnitude(x));
}

}  // namespace
}  // namespace jaxtap::cuda
