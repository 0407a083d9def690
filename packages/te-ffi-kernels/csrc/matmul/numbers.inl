// What is done with the numbers of a row, by loops that compilers vectorise. AVX-512 has its own in
// avx512/numbers.inl, with the same results.

// body(i) for each number: in blocks whose ends are known where they divide the count.
template <typename Body>
JAXTAP_INLINE void each_number(int64_t count, const Body& body) {
  if (count % 32 == 0) {
    for (int64_t i = 0; i < count; i += 32) {
      for (int j = 0; j < 32; ++j) body(i + j);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) body(i);
  }
}

// Bits of the largest magnitude: more than those of infinity if there is a NaN.
template <DType kType>
inline uint32_t largest_bits(const uint8_t* x, int64_t count) {
  uint32_t largest = 0;
  each_number(count, [&](int64_t i) __attribute__((always_inline)) {
    const uint32_t bits = float_bits(load_float<kType>(x, i)) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  });
  return largest;
}

// Quantized values by a product with the reciprocal: false if a ratio is beyond kSafeRounding. Ratios
// must be at most 127.25, or are cut at 127.
template <DType kType, bool kClips>
inline bool quantize_fast(const uint8_t* x, int64_t count, float reciprocal, int8_t* out) {
  constexpr float kShift = 12582912.0f;  // its last place is 1
  uint32_t doubtful = 0;
  for (int64_t j = 0; j < count; ++j) {
    float ratio = load_float<kType>(x, j) * reciprocal;
    if (kClips) {
      ratio = ratio < -127.0f ? -127.0f : ratio;
      ratio = ratio > 127.0f ? 127.0f : ratio;
    }
    const float shifted = ratio + kShift;
    const float rest = ratio - (shifted - kShift);
    doubtful |= static_cast<uint32_t>((float_bits(rest) & 0x7fffffffu) > float_bits(kSafeRounding));
    out[j] = static_cast<int8_t>(float_bits(shifted) & 0xffu);
  }
  return doubtful == 0;
}

// Numbers times `factor`, rounded, to two digits, and the sums of the digits.
template <DType kType>
inline void quantize_fixed(const uint8_t* x, int64_t count, float factor, int8_t* low, int8_t* high,
                           int32_t* low_sum, int32_t* high_sum) {
  constexpr float kShift = 12582912.0f;  // its last place is 1
  int32_t whole_sum = 0, upper_sum = 0;
  each_number(count, [&](int64_t i) __attribute__((always_inline)) {
    const float shifted = load_float<kType>(x, i) * factor + kShift;
    const int32_t whole = static_cast<int32_t>(float_bits(shifted) - float_bits(kShift));
    const int32_t upper = (whole + 128) >> 8;
    low[i] = static_cast<int8_t>(whole);
    high[i] = static_cast<int8_t>(upper);
    whole_sum += whole;
    upper_sum += upper;
  });
  *low_sum = whole_sum - 256 * upper_sum;
  *high_sum = upper_sum;
}

inline int32_t sum_of(const int8_t* values, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}
