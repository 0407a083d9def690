// Products of rows with quantized values, a row at a time: of 8 bits, and of 4. Included after
// vectors.inl, Rows of tile.inl and what differs:
//
//   struct Eight;  eight numbers of a row of x, as they are multiplied
//   Eight eight_of(int8x8_t);
//   struct Lines;  64 bytes, 16 columns of four rows of K: uint8x16_t at(int line)
//   Lines lines_at(const uint8_t*);
//   // Adds products of the bytes of line kLine with the first four numbers, or the last.
//   template <int kLine, bool kLast>
//   void add_line(Sums&, uint8x16_t bytes, const Eight&);
//
// With kSignedSums bytes are multiplied as signed ones: Rows have `flip`, which quantized values are
// combined with first.

// body(line) for constants 0 to 3.
template <typename Body>
JAXTAP_INLINE void each_line(const Body& body) {
  body(std::integral_constant<int, 0>());
  body(std::integral_constant<int, 1>());
  body(std::integral_constant<int, 2>());
  body(std::integral_constant<int, 3>());
}

// Four rows of K.
template <bool kLast, int R>
JAXTAP_INLINE void add_lines([[maybe_unused]] const Rows<R>& rows, const uint8_t* qvalues,
                             const Eight (&x)[R], Sums (&acc)[R][1]) {
  const Lines lines = lines_at(qvalues);
  each_line([&](auto line) __attribute__((always_inline)) {
    constexpr int kLine = decltype(line)::value;
    uint8x16_t bytes = lines.at(kLine);
    if constexpr (kSignedSums) bytes = veorq_u8(bytes, rows.flip);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) add_line<kLine, kLast>(acc[r][0], bytes, x[r]);
  });
}

template <int R>
JAXTAP_INLINE void add_rows(const Rows<R>& rows, const uint8_t* qvalues, int64_t k,
                            Sums (&acc)[R][1]) {
  int64_t i = 0;
  for (; i + 8 <= k; i += 8, qvalues += 128) {
    __builtin_prefetch(qvalues + kAhead);
    __builtin_prefetch(qvalues + kAhead + 64);
    Eight x[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) x[r] = eight_of(vld1_s8(rows.x + r * rows.stride + i));
    add_lines<false>(rows, qvalues, x, acc);
    add_lines<true>(rows, qvalues + 64, x, acc);
  }
  if (i == k) return;
  Eight x[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) x[r] = eight_of(four_of(rows.x + r * rows.stride + i));
  add_lines<false>(rows, qvalues, x, acc);
}

// 16 columns at a time: the sums of 32 would leave no registers.
template <bool kTable, int kRows>
JAXTAP_INLINE void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
                               const uint8_t* qvalues, int64_t k, const int32_t* offsets,
                               int64_t offsets_stride, int32_t (*sums)[32]) {
  // What the table's numbers are the bytes of, signed or not. Places themselves are small enough to
  // be either.
  const auto zero = static_cast<uint8_t>(kSignedSums ? table.zero_point : 0);
  const uint8x16_t bytes = vsubq_u8(vld1q_u8(table.bytes[part]), vdupq_n_u8(zero));
  const uint8x16_t mask = vdupq_n_u8(0x0f);
  for (int half = 0; half < 2; ++half) {
    Sums acc[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      // Signed bytes of a table are less by the zero point already; places never are.
      acc[r] = sums_of(kTable && kSignedSums ? 0 : -offsets[r * offsets_stride]);
    }
    const uint8_t* from = qvalues + 64 * half;
    for (int64_t i = 0; i < k; i += 8, from += 128) {
      __builtin_prefetch(from + kAhead);
      Eight eight[kRows];
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) eight[r] = eight_of(vld1_s8(x + r * x_stride + i));
      const Lines lines = lines_at(from);
      each_line([&](auto line) __attribute__((always_inline)) {
        constexpr int kLine = decltype(line)::value;
        const uint8x16_t both = lines.at(kLine);
        const uint8x16_t lower = vandq_u8(both, mask), upper = vshrq_n_u8(both, 4);
        const uint8x16_t low = kTable ? vqtbl1q_u8(bytes, lower) : lower;
        const uint8x16_t high = kTable ? vqtbl1q_u8(bytes, upper) : upper;
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          add_line<kLine, false>(acc[r], low, eight[r]);
          add_line<kLine, true>(acc[r], high, eight[r]);
        }
      });
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) store_sums(sums[r] + 16 * half, acc[r]);
  }
}
