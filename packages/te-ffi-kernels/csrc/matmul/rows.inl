// Work before the matmuls: quantizing rows of x, and expanding panels of 4 bits.
//
// Included by the kernels of each instruction set within a namespace of its own, and compiled with
// its flags: the loops are written for the compiler to vectorise. -ffp-contract=off is needed.

constexpr int64_t kChunk = 256;
constexpr float kTwo23 = 8388608.0f;

template <DType kType>
JAXTAP_INLINE float load_float(const uint8_t* x, int64_t index) {
  if (kType == DType::F32) {
    float value;
    __builtin_memcpy(&value, x + 4 * index, 4);
    return value;
  }
  uint16_t half;
  __builtin_memcpy(&half, x + 2 * index, 2);
  return kType == DType::BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Rounds to an integer, half to even; |x| < 2 ** 23.
JAXTAP_INLINE int32_t round_even(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = float_bits(bits_float(bits & 0x7fffffffu) + kTwo23) - 0x4b000000u;
  const uint32_t sign = 0u - (bits >> 31);
  return static_cast<int32_t>((rounded ^ sign) - sign);
}

// A product with the reciprocal is off from the rounded quotient by less than 127 * 3 * 2 ** -24, for
// ratios up to 127: ratios this far from their quantized value, at most, are rounded alike by both.
constexpr float kSafeRounding = 0.49997f;

#if defined(__AVX512F__)
#include "matmul/avx512/numbers.inl"
#else
#include "matmul/numbers.inl"
#endif

// Dynamic int8, by the numbers of quant-numerics' "absmax": what XLA makes of absmax / 127 is a
// product with the reciprocal, and the quantized values are by division. Beside a scale that is
// given, numbers may be larger than 127 of it.
template <DType kType>
inline void quantize_int8(const Quantize& q, uint32_t largest) {
  constexpr float kReciprocal = 1.0f / 127.0f;
  constexpr float kLeast = 0x1p-126f, kLargestDivisor = 0x1p126f;
  float scale = q.given != nullptr ? *q.given : bits_float(largest) * kReciprocal;
  scale = scale < kLeast ? kLeast : scale;
  *q.scale = scale;
  const float divisor = scale > kLargestDivisor ? kLargestDivisor : scale;
  const float reciprocal = 1.0f / divisor;
  const bool finite = largest < 0x7f800000u;
  const bool clips = q.given != nullptr && bits_float(largest) * reciprocal > 127.25f;
  for (int64_t i = 0; i < q.k; i += kChunk) {
    const int64_t count = q.k - i < kChunk ? q.k - i : kChunk;
    const uint8_t* x = q.x + i * (kType == DType::F32 ? 4 : 2);
    int8_t* out = q.out + i;
    if (finite && (clips ? quantize_fast<kType, true>(x, count, reciprocal, out)
                         : quantize_fast<kType, false>(x, count, reciprocal, out))) {
      continue;
    }
    for (int64_t j = 0; j < count; ++j) {
      float ratio = load_float<kType>(x, j) / divisor;
      ratio = ratio == ratio ? ratio : 0.0f;
      ratio = ratio < -127.0f ? -127.0f : ratio;
      ratio = ratio > 127.0f ? 127.0f : ratio;
      out[j] = static_cast<int8_t>(round_even(ratio));
    }
  }
}

// The shift of fixed point with a sign and kBits bits: largest * 2 ** shift rounds to kLimit at
// most, with the bits of a finite `largest`. Numbers below 2 ** -103 lose bits.
template <int kBits>
inline int fixed_point_shift(uint32_t largest) {
  constexpr float kLimit = kBits == 15 ? 32639.0f : 8355711.0f;
  // largest = fraction * 2 ** exponent with 0.5 <= fraction < 1.
  const int exponent = static_cast<int>(largest >> 23) - 126;
  const float fraction = bits_float((largest & 0x7fffffu) | 0x3f000000u);
  int shift = kBits - exponent;
  if (fraction * static_cast<float>(1 << kBits) >= kLimit + 0.5f) --shift;
  return shift > 126 ? 126 : shift;
}

JAXTAP_INLINE float power_of_two(int exponent) {
  return bits_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// `count` numbers of the segment that begins at `begin` to two digits, as `quantize_digits`.
template <DType kType>
inline void quantize_pair(const Quantize& q, const uint8_t* x, int64_t begin, int64_t count) {
  const int64_t i = begin / q.segment_k;
  int8_t* low = q.out + begin;
  int8_t* high = low + q.out_stride;
  int32_t low_sum = 0, high_sum = 0;
  const uint32_t largest = largest_bits<kType>(x, count);
  const bool finite = largest < 0x7f800000u;
  const int shift = finite ? fixed_point_shift<15>(largest) : 0;
  q.scale[i] = finite ? power_of_two(-shift) : bits_float(0x7fc00000u);
#if defined(__AVX512F__)
  if (q.int16_digits) {
    int8_t* out = q.out + 2 * begin;
    if (finite) return quantize_int16<kType>(x, count, power_of_two(shift), out);
    __builtin_memset(out, 0, static_cast<size_t>(2 * count));
    return;
  }
#endif
  if (finite) {
    quantize_fixed<kType>(x, count, power_of_two(shift), low, high, &low_sum, &high_sum);
  } else {
    __builtin_memset(low, 0, static_cast<size_t>(count));
    __builtin_memset(high, 0, static_cast<size_t>(count));
  }
  q.offsets[i] = low_sum * q.zero_point;
  q.offsets[q.offsets_stride + i] = high_sum * q.zero_point;
}

template <DType kType>
inline void quantize_segments(const Quantize& q) {
  constexpr int64_t kSize = kType == DType::F32 ? 4 : 2;
  for (int64_t begin = 0; begin < q.padded_k; begin += q.segment_k) {
    const int64_t rest = q.padded_k - begin, left = q.k - begin;
    const int64_t count = rest < q.segment_k ? rest : q.segment_k;
    const uint8_t* x = q.x + begin * kSize;
    uint8_t padded[kChunk * kSize];
    if (left < count) {  // the last segment of a padded row: not longer than kChunk
      __builtin_memcpy(padded, x, static_cast<size_t>(left * kSize));
      __builtin_memset(padded + left * kSize, 0, static_cast<size_t>((count - left) * kSize));
      x = padded;
    }
    quantize_pair<kType>(q, x, begin, count);
  }
}

inline void quantize_pairs(const Quantize& q) {
  if (q.x_dtype == DType::F32) {
    quantize_segments<DType::F32>(q);
  } else if (q.x_dtype == DType::BF16) {
    quantize_segments<DType::BF16>(q);
  } else {
    quantize_segments<DType::F16>(q);
  }
}

// Two digits of one segment of digit rows whose sums are there, as a float.
JAXTAP_INLINE float two_digit_sum(int32_t low, int32_t high, bool fits_int32) {
  if (fits_int32) {
    const uint32_t sum = (static_cast<uint32_t>(high) << 8) + static_cast<uint32_t>(low);
    return static_cast<float>(static_cast<int32_t>(sum));
  }
  return static_cast<float>(high) * 256.0f + static_cast<float>(low);
}

// Fixed point: x = q * 2 ** -shift with |q| <= 127 * (1 + 256 + 65536), and q = sum of 256 ** p *
// digit p. The power of two makes numbers exact that have no bits below the last of q.
template <DType kType>
inline void quantize_digits(const Quantize& q, uint32_t largest) {
  if (largest >= 0x7f800000u) {
    *q.scale = bits_float(0x7fc00000u);
    for (int p = 0; p < 3; ++p) {
      __builtin_memset(q.out + p * q.out_stride, 0, static_cast<size_t>(q.k));
    }
    return;
  }
  const int shift = fixed_point_shift<23>(largest);
  const float factor = power_of_two(shift);
  *q.scale = power_of_two(-shift);
  int8_t* low = q.out;
  int8_t* middle = low + q.out_stride;
  int8_t* high = middle + q.out_stride;
  for (int64_t i = 0; i < q.k; i += kChunk) {
    const int64_t count = q.k - i < kChunk ? q.k - i : kChunk;
    int32_t whole[kChunk];
    for (int64_t j = 0; j < count; ++j) {
      whole[j] = round_even(load_float<kType>(q.x, i + j) * factor);
    }
    for (int64_t j = 0; j < count; ++j) low[i + j] = static_cast<int8_t>(whole[j]);
    for (int64_t j = 0; j < count; ++j) {
      middle[i + j] = static_cast<int8_t>((whole[j] + 128) >> 8);
    }
    for (int64_t j = 0; j < count; ++j) {
      high[i + j] = static_cast<int8_t>((((whole[j] + 128) >> 8) + 128) >> 8);
    }
  }
}

template <DType kType>
inline void quantize_values(const Quantize& q) {
  const uint32_t largest = q.bounded ? 0 : largest_bits<kType>(q.x, q.k);
  if (q.digits == 1) {
    quantize_int8<kType>(q, largest);
  } else {
    quantize_digits<kType>(q, largest);
  }
}

inline void quantize_row(const Quantize& q) {
  if (q.x_dtype == DType::F32) {
    quantize_values<DType::F32>(q);
  } else if (q.x_dtype == DType::BF16) {
    quantize_values<DType::BF16>(q);
  } else {
    quantize_values<DType::F16>(q);
  }
  for (int p = 0; p < q.digits; ++p) {
    int8_t* digit = q.out + p * q.out_stride;
    __builtin_memset(digit + q.k, 0, static_cast<size_t>(q.padded_k - q.k));
    int32_t* offset = q.offsets + p * q.offsets_stride;
    for (int64_t i = 0; i < q.padded_k; i += q.segment_k) {
      const int64_t rest = q.padded_k - i;
      const int64_t count = rest < q.segment_k ? rest : q.segment_k;
      *offset++ = sum_of(digit + i, count) * q.zero_point;
    }
  }
}

// Bytes of a table for 64 bytes with a low and a high place each.
JAXTAP_INLINE void look_up(const uint8_t* nibbles, const uint8_t* table, uint8_t* out) {
#if defined(__AVX512BW__)
  const __m512i mask = _mm512_set1_epi8(0x0f), both = _mm512_loadu_si512(nibbles);
  const __m512i bytes = _mm512_broadcast_i32x4(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
  _mm512_storeu_si512(out, _mm512_shuffle_epi8(bytes, _mm512_and_si512(both, mask)));
  _mm512_storeu_si512(out + 64, _mm512_shuffle_epi8(bytes, high));
#elif defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi8(0x0f);
  const __m256i bytes = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int i = 0; i < 64; i += 32) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles + i));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    auto* to = reinterpret_cast<__m256i*>(out + i);
    _mm256_storeu_si256(to, _mm256_shuffle_epi8(bytes, _mm256_and_si256(both, mask)));
    _mm256_storeu_si256(to + 2, _mm256_shuffle_epi8(bytes, high));
  }
#elif defined(JAXTAP_NEON)
  const uint8x16_t bytes = vld1q_u8(table);
  for (int i = 0; i < 64; i += 16) {
    const uint8x16_t both = vld1q_u8(nibbles + i);
    vst1q_u8(out + i, vqtbl1q_u8(bytes, vandq_u8(both, vdupq_n_u8(0x0f))));
    vst1q_u8(out + 64 + i, vqtbl1q_u8(bytes, vshrq_n_u8(both, 4)));
  }
#else
  for (int i = 0; i < 64; ++i) {
    out[i] = table[nibbles[i] & 0x0f];
    out[64 + i] = table[nibbles[i] >> 4];
  }
#endif
}

// The groups of a panel, each part of a table one: its scales to both halves, and the lines of its
// quantized values by `expand(part, line, out)`, each of 64 bytes to kBytes.
template <int kBytes, typename Body>
JAXTAP_INLINE void expand_groups(const Expand& e, const Body& expand) {
  const PanelLayout& layout = *e.layout;
  const Table& table = layout.table();
  const int64_t groups = layout.scales(), lines = layout.padded_k() / groups / 8;
  for (int64_t g = 0; g < groups; ++g) {
    float loaded[32];
    load_scales(e.panel, layout, e.panel + layout.scales_at(g), loaded);
    const uint8_t* from = e.panel + layout.scales_at(g) + layout.scale_bytes();
    for (int part = 0; part < table.parts; ++part) {
      const int64_t at = g * table.parts + part, count = groups * table.parts;
      for (int64_t half = 0; half < 2; ++half) {
        float* scales = e.scales + 16 * (half * count + at);
        for (int c = 0; c < 16; ++c) scales[c] = loaded[16 * half + c] * table.factors[part];
        uint8_t* out = e.qvalues + kBytes * lines * (half * count + at);
        for (int64_t i = 0; i < lines; ++i) {
          expand(part, from + 128 * i + 64 * half, out + kBytes * i);
        }
      }
    }
  }
}

template <bool kSigned>
inline void expand_panel(const Expand& e) {
  const Table& table = e.layout->table();
  uint8_t bytes[2][16];
  for (int i = 0; i < 32; ++i) {
    bytes[i / 16][i % 16] =
        static_cast<uint8_t>(table.bytes[i / 16][i % 16] - (kSigned ? table.zero_point : 0));
  }
  expand_groups<128>(e, [&](int part, const uint8_t* from, uint8_t* out)
                            __attribute__((always_inline)) { look_up(from, bytes[part], out); });
}
