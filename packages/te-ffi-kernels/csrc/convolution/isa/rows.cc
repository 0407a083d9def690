// Depthwise convolutions of rows of images. Sums are of whole numbers that
// float32 holds, so a fused multiply-add gives the same bits as two operations.

#include "common/lanes.h"
#include "convolution/table.h"

namespace jaxtap::convolution::JAXTAP_ISA_NAMESPACE {
namespace {

using namespace lanes::JAXTAP_ISA_NAMESPACE;

JAXTAP_INLINE Floats signed_numbers(Bytes x) {
#if defined(__AVX512F__)
  return same_bits<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(same_bits<__m128i>(x))));
#elif defined(__AVX2__)
  const __m128i low = _mm_cvtsi64_si128(same_bits<int64_t>(x));
  return same_bits<Floats>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)));
#else
  Floats wide{};
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(static_cast<int8_t>(x[i]));
  return wide;
#endif
}

JAXTAP_INLINE Floats add_product(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return same_bits<Floats>(
      _mm512_fmadd_ps(same_bits<__m512>(a), same_bits<__m512>(b), same_bits<__m512>(sum)));
#elif defined(__AVX2__)
  return same_bits<Floats>(
      _mm256_fmadd_ps(same_bits<__m256>(a), same_bits<__m256>(b), same_bits<__m256>(sum)));
#else
  return a * b + sum;
#endif
}

template <class Format>
JAXTAP_INLINE Floats rounded(Floats x) {
  return Format::widen(Format::narrow(x));
}

template <class Format, class Where>
JAXTAP_INLINE void put(const Depthwise& d, int64_t pixel, int64_t channel, Floats sum,
                       Where where) {
  using Type = typename Format::Type;
  const Output& out = d.out;
  const auto at = [&](const uint8_t* from) {
    return reinterpret_cast<const Type*>(from + pixel * out.stride) + channel;
  };
  Floats y = sum * d.x_scale * read<Floats>(d.scales + channel, where);
  if (out.bias != nullptr) {
    y = rounded<Format>(y) +
        load<Format>(reinterpret_cast<const Type*>(out.bias) + channel, where);
  }
  if (out.residual != nullptr) y = rounded<Format>(y) + load<Format>(at(out.residual), where);
  if (out.clamps) {
    y = y < out.least ? all(out.least) : y;
    y = y > out.most ? all(out.most) : y;
  }
  store<Format>(const_cast<Type*>(at(out.y)), y, where);
}

// Pixels whose sums are in registers at once: each weight is loaded once for all.
template <class Format, int kCount, class Where>
JAXTAP_INLINE void pixels(const Depthwise& d, int64_t pixel, int64_t channel, Where where) {
  Floats sums[kCount] = {};
  const int64_t step = d.stride * kLanes;
  const float* x = d.x + channel * d.line + pixel * step;
  const float* weights = d.weights + channel;
  for (int64_t tap = 0; tap < d.tap_count; ++tap, weights += d.out.columns) {
    const Floats weight = read<Floats>(weights, where);
    const float* at = x + d.taps[tap] * kLanes;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      sums[i] = add_product(read<Floats>(at + i * step), weight, sums[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) put<Format>(d, pixel + i, channel, sums[i], where);
}

template <class Format>
void depthwise_row(const Depthwise& d) {
  over(d.out.columns, [&](int64_t channel, auto where) {
    int64_t pixel = 0;
    for (; pixel + 8 <= d.pixels; pixel += 8) pixels<Format, 8>(d, pixel, channel, where);
    if (pixel + 4 <= d.pixels) {
      pixels<Format, 4>(d, pixel, channel, where);
      pixel += 4;
    }
    if (pixel + 2 <= d.pixels) {
      pixels<Format, 2>(d, pixel, channel, where);
      pixel += 2;
    }
    if (pixel < d.pixels) pixels<Format, 1>(d, pixel, channel, where);
  });
}

void spread(const int8_t* x, int64_t pixels, int64_t channels, float* line, int64_t line_pixels) {
  over(channels, [&](int64_t channel, auto where) {
    float* out = line + channel * line_pixels;
    for (int64_t i = 0; i < pixels; ++i) {
      write(out + i * kLanes, signed_numbers(read<Bytes>(x + i * channels + channel, where)));
    }
  });
}

void depthwise(const Depthwise& d) {
  if (d.out.dtype == DType::F32) {
    depthwise_row<F32>(d);
  } else if (d.out.dtype == DType::BF16) {
    depthwise_row<BF16>(d);
  } else {
    depthwise_row<F16>(d);
  }
}

}  // namespace

const Table& make_table() {
  static const Table table{kLanes, spread, depthwise};
  return table;
}

}  // namespace jaxtap::convolution::JAXTAP_ISA_NAMESPACE
