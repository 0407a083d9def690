// Products with panels of 4 bits, in vectors of 256 bits. Included after vectors.inl and
//
//   // Adds products of bytes of a table with numbers of x. kSmall: four of them fit int16.
//   template <bool kSmall>
//   void add_both(__m256i& sums, __m256i low, __m256i high, __m256i x_low, __m256i x_high);

// Adds products with bytes of a table over `k` rows of K to the sums of R digit rows and the two
// halves of 16 columns, whose lines are kStride bytes apart. kSmall: four products fit int16.
template <bool kTable, bool kSmall, int R, int kStride>
JAXTAP_INLINE void add_nibbles(const uint8_t* table, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, __m256i (&acc)[R][2]) {
  const __m256i mask = _mm256_set1_epi8(0x0f);
  const __m256i bytes = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int64_t i = 0; i < k; i += 8, qvalues += kStride) {
    _mm_prefetch(reinterpret_cast<const char*>(qvalues + kAhead), _MM_HINT_T0);
    __m256i low[2], high[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i both = load(qvalues + 32 * h);
      const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      const __m256i lower = _mm256_and_si256(both, mask);
      low[h] = kTable ? _mm256_shuffle_epi8(bytes, lower) : lower;
      high[h] = kTable ? _mm256_shuffle_epi8(bytes, upper) : upper;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const int8_t* row = x + r * x_stride + i;
      const __m256i b_low = broadcast4(row), b_high = broadcast4(row + 4);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        add_both<kSmall>(acc[r][h], low[h], high[h], b_low, b_high);
      }
    }
  }
}

// 16 columns at a time: the sums of 32 would leave no registers.
template <bool kTable, int kRows>
JAXTAP_INLINE void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, const int32_t* offsets,
                               int64_t offsets_stride, int32_t (*sums)[32]) {
  const uint8_t* bytes = table.bytes[part];
  for (int half = 0; half < 2; ++half) {
    __m256i acc[kRows][2];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = acc[r][1] = _mm256_set1_epi32(-offsets[r * offsets_stride]);
    }
    const uint8_t* from = qvalues + 64 * half;
    !kTable || table.is_small()
        ? add_nibbles<kTable, true, kRows, 128>(bytes, x, x_stride, from, k, acc)
        : add_nibbles<kTable, false, kRows, 128>(bytes, x, x_stride, from, k, acc);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      __m256i* to = reinterpret_cast<__m256i*>(sums[r] + 16 * half);
      _mm256_storeu_si256(to, acc[r][0]);
      _mm256_storeu_si256(to + 1, acc[r][1]);
    }
  }
}
