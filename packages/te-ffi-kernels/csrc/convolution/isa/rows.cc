// Depthwise convolutions of rows of images, and results as int8. Sums are of whole numbers that
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

// Beyond this distance from a whole number a quotient may round otherwise than the product with the
// reciprocal, as in matmul/rows.inl.
constexpr float kSafeRounding = 0.49997f;

// Whether any magnitude is not up to a bound: a NaN isn't.
JAXTAP_INLINE bool any_beyond(Floats x, float bound) {
#if defined(__AVX512F__)
  const __m512 magnitude = _mm512_abs_ps(same_bits<__m512>(x));
  return _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(bound), _CMP_NLE_UQ) != 0;
#elif defined(__AVX2__)
  const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), same_bits<__m256>(x));
  return _mm256_movemask_ps(_mm256_cmp_ps(magnitude, _mm256_set1_ps(bound), _CMP_NLE_UQ)) != 0;
#else
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found |= !(x[i] <= bound && x[i] >= -bound);
  return found;
#endif
}

// What is beyond 127 saturates; a NaN stays.
JAXTAP_INLINE Floats cut(Floats x) {
#if defined(__AVX512F__)  // the second operand where one is NaN
  const __m512 below = _mm512_min_ps(_mm512_set1_ps(127.0f), same_bits<__m512>(x));
  return same_bits<Floats>(_mm512_max_ps(_mm512_set1_ps(-127.0f), below));
#elif defined(__AVX2__)
  const __m256 below = _mm256_min_ps(_mm256_set1_ps(127.0f), same_bits<__m256>(x));
  return same_bits<Floats>(_mm256_max_ps(_mm256_set1_ps(-127.0f), below));
#else
  x = x < -127.0f ? all(-127.0f) : x;
  return x > 127.0f ? all(127.0f) : x;
#endif
}

// To the nearest whole number, half to even, of magnitudes up to 127.
JAXTAP_INLINE Floats whole(Floats x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

// Quotients instead of products, and 0 for a NaN.
__attribute__((noinline, cold)) Floats divided(const Floats& x, float divisor) {
  const Floats ratio = x / divisor;
  return whole(cut(ratio == ratio ? ratio : all(0.0f)));
}

// Whole numbers of magnitudes up to 127 to bytes.
template <class Where>
JAXTAP_INLINE void write_bytes(int8_t* to, Floats x, Where where) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtps_epi32(same_bits<__m512>(x));
  write(to, same_bits<Bytes>(_mm512_cvtepi32_epi8(wide)), where);
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtps_epi32(same_bits<__m256>(x));
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  const auto bytes = static_cast<int64_t>(_mm_cvtsi128_si64(_mm_packs_epi16(words, words)));
  write(to, same_bits<Bytes>(bytes), where);
#else
  Bytes bytes{};
  for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<uint8_t>(static_cast<int8_t>(x[i]));
  write(to, bytes, where);
#endif
}

// The quantized values of several vectors: what is asked of one of them is asked of all.
template <int kCount>
JAXTAP_INLINE void quantize(Floats (&x)[kCount], Scale scale) {
  Floats near[kCount];
  bool beyond = false;
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    const Floats ratio = cut(x[i] * scale.reciprocal);
    near[i] = whole(ratio);
    beyond |= any_beyond(ratio - near[i], kSafeRounding);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    x[i] = __builtin_expect(beyond, 0) ? divided(x[i], scale.divisor) : near[i];
  }
}

// A sum, rescaled, with what is added to it.
template <class Format, class Where>
JAXTAP_INLINE Floats finished(const Depthwise& d, int64_t pixel, int64_t channel, Floats sum,
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
  return y;
}

// Pixels whose sums are in registers at once: each weight is loaded once for all.
template <class Format, bool kToInt8, int kCount, class Where>
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
  for (int i = 0; i < kCount; ++i) {
    sums[i] = finished<Format>(d, pixel + i, channel, sums[i], where);
    if constexpr (kToInt8) {
      sums[i] = rounded<Format>(sums[i]);
    } else {
      uint8_t* y = d.out.y + (pixel + i) * d.out.stride;
      store<Format>(reinterpret_cast<typename Format::Type*>(y) + channel, sums[i], where);
    }
  }
  if constexpr (kToInt8) {
    quantize(sums, d.y_scale);
    int8_t* to = d.qvalues + pixel * d.out.columns + channel;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) write_bytes(to + i * d.out.columns, sums[i], where);
  }
}

template <class Format, bool kToInt8>
void depthwise_row(const Depthwise& d) {
  over(d.out.columns, [&](int64_t channel, auto where) {
    int64_t pixel = 0;
    for (; pixel + 8 <= d.pixels; pixel += 8) pixels<Format, kToInt8, 8>(d, pixel, channel, where);
    if (pixel + 4 <= d.pixels) {
      pixels<Format, kToInt8, 4>(d, pixel, channel, where);
      pixel += 4;
    }
    if (pixel + 2 <= d.pixels) {
      pixels<Format, kToInt8, 2>(d, pixel, channel, where);
      pixel += 2;
    }
    if (pixel < d.pixels) pixels<Format, kToInt8, 1>(d, pixel, channel, where);
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

template <class Format>
void depthwise_of(const Depthwise& d) {
  d.qvalues == nullptr ? depthwise_row<Format, false>(d) : depthwise_row<Format, true>(d);
}

void depthwise(const Depthwise& d) {
  if (d.out.dtype == DType::F32) {
    depthwise_of<F32>(d);
  } else if (d.out.dtype == DType::BF16) {
    depthwise_of<BF16>(d);
  } else {
    depthwise_of<F16>(d);
  }
}

template <class Format>
void round_rows(const Rounded& r) {
  for (int64_t row = 0; row < r.rows; ++row) {
    const auto* from =
        reinterpret_cast<const typename Format::Type*>(r.from + row * r.from_stride);
    int8_t* to = r.to + row * r.to_stride;
    int64_t i = 0;
    for (; i + 4 * kLanes <= r.columns; i += 4 * kLanes) {
      Floats x[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) x[j] = load<Format>(from + i + j * kLanes);
      quantize(x, r.scale);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) write_bytes(to + i + j * kLanes, x[j], Whole());
    }
    over(r.columns - i, [&](int64_t rest, auto where) {
      Floats x[1] = {load<Format>(from + i + rest, where)};
      quantize(x, r.scale);
      write_bytes(to + i + rest, x[0], where);
    });
  }
}

void round(const Rounded& r) {
  if (r.dtype == DType::F32) {
    round_rows<F32>(r);
  } else if (r.dtype == DType::BF16) {
    round_rows<BF16>(r);
  } else {
    round_rows<F16>(r);
  }
}

#if defined(__AVX512F__)
// Sums of four bytes each, in 16 lanes.
JAXTAP_INLINE __m512i word_sums(const int8_t* x, int64_t size) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    sums = _mm512_dpbusd_epi32(sums, ones, _mm512_loadu_si512(x + i));
  }
  if (i == size) return sums;
  const __mmask64 rest = (__mmask64{1} << (size - i)) - 1;
  return _mm512_dpbusd_epi32(sums, ones, _mm512_maskz_loadu_epi8(rest, x + i));
}

// The sum of the lanes of each of 16 vectors: halves of pairs are added up, in four steps.
JAXTAP_INLINE __m512i sums_of_lanes(__m512i (&x)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                            _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]),
                            _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    x[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0xdd));
  }
  return _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x88),
                          _mm512_shuffle_i32x4(x[0], x[1], 0xdd));
}
#endif

void sum(const int8_t* x, int64_t count, int64_t size, int32_t zero_point, int32_t* sums) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    __m512i words[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) words[j] = word_sums(x + (i + j) * size, size);
    const __m512i found = _mm512_mullo_epi32(sums_of_lanes(words), _mm512_set1_epi32(zero_point));
    _mm512_storeu_si512(sums + i, found);
  }
#endif
  for (; i < count; ++i) {
    int32_t found = 0;
    for (int64_t j = 0; j < size; ++j) found += x[i * size + j];
    sums[i] = found * zero_point;
  }
}

void unpack(const uint8_t* line, int shift, int32_t mask, int32_t zero_point, int64_t columns,
            float* to) {
  over(columns, [&](int64_t i, auto where) {
    // Lines are of 16 or 32 columns: whole vectors can be read.
    const Ints found = (same_bits<Ints>(read<Words>(line + 4 * i) >> shift) & mask) - zero_point;
    write(to + i, __builtin_convertvector(found, Floats), where);
  });
}

}  // namespace

const Table& make_table() {
  static const Table table{kLanes, spread, depthwise, round, sum, unpack};
  return table;
}

}  // namespace jaxtap::convolution::JAXTAP_ISA_NAMESPACE
