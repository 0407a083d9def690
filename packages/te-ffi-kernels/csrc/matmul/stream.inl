// A few rows times a panel of 4 bits, which is read once, from its first byte to its last.
//
// Included by the kernels of each instruction set after epilogue.inl and after
//
//   // Sums of products with a part of the table's numbers over `k` rows of K, less the offsets, of
//   // kRows digit rows. Without kTable places are the numbers, plus the zero point.
//   template <bool kTable, int kRows>
//   void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
//                    const uint8_t* qvalues, int64_t k, const int32_t* offsets,
//                    int64_t offsets_stride, int32_t (*sums)[32]);

constexpr int kStreamColumns = 32;

template <bool kTable, int kRows, int kDigits>
inline void stream_rows(const Stream& s, int64_t row) {
  float totals[kRows][kStreamColumns] = {}, loaded[kStreamColumns], scales[kStreamColumns];
  const PanelLayout& layout = *s.layout;
  const Table& table = layout.table();
  const int8_t* x = s.x + row * kDigits * s.x_stride;
  const int32_t* offsets = s.offsets + row * kDigits * s.offsets_stride;
  const float* x_scales = s.x_scales == nullptr ? nullptr : s.x_scales + row * s.x_scales_stride;
  const uint8_t* at = s.panel + layout.scales_at(0);
  for (int64_t i = 0; i < s.k; i += s.segment_k, ++offsets) {
    if (i == 0 || s.grouped) {
      load_scales(s.panel, layout, at, loaded);
      at += layout.scale_bytes();
    }
    const int64_t count = s.k - i < s.segment_k ? s.k - i : s.segment_k;
    const int parts = kTable ? table.parts : 1;
    for (int part = 0; part < parts; ++part) {
      alignas(64) int32_t sums[kRows * kDigits][kStreamColumns];
      const auto add = [&](int64_t k) __attribute__((always_inline)) {
        nibble_sums<kTable, kRows * kDigits>(table, part, x + i, s.x_stride, at, k, offsets,
                                     s.offsets_stride, sums);
      };
      if (count == 32) {  // loops whose end is known
        add(32);
      } else if (count == 16) {
        add(16);
      } else {
        add(count);
      }
      for (int c = 0; c < kStreamColumns; ++c) scales[c] = loaded[c] * table.factors[part];
      for (int r = 0; r < kRows; ++r) {
        const int32_t(*digit)[kStreamColumns] = sums + r * kDigits;
        const float x_scale = x_scales == nullptr ? 1.0f : x_scales[r * s.x_scales_stride];
        for (int c = 0; c < kStreamColumns; ++c) {
          float value = static_cast<float>(digit[0][c]);
          if (kDigits == 2) {
            value = two_digit_sum(digit[0][c], digit[1][c], s.fits_int32);
          } else if (kDigits == 3) {
            value = (static_cast<float>(digit[2][c]) * 65536.0f +
                     static_cast<float>(digit[1][c]) * 256.0f) +
                    value;
          }
          if (kDigits != 3) value *= x_scale;
          totals[r][c] += value * scales[c];
        }
      }
    }
    at += kStreamColumns / 2 * count;
    if (x_scales != nullptr) x_scales += s.x_scales_step;
  }
  for (int r = 0; r < kRows; ++r) {
    const float row_scale = s.row_scales == nullptr ? 1.0f : s.row_scales[row + r];
    for (int c = 0; c < kStreamColumns; ++c) totals[r][c] *= row_scale;
    for (int64_t c = 0; c < s.out.columns; c += 16) store_16<true>(s.out, row + r, c, totals[r] + c);
  }
}

template <bool kTable, int kDigits>
inline void stream_table(const Stream& s) {
  int64_t row = 0;
  for (; row + 2 <= s.rows; row += 2) stream_rows<kTable, 2, kDigits>(s, row);
  if (row < s.rows) stream_rows<kTable, 1, kDigits>(s, row);
}

template <int kDigits>
inline void stream_digits(const Stream& s) {
  s.layout->table_id == 0 ? stream_table<false, kDigits>(s) : stream_table<true, kDigits>(s);
}

inline void stream(const Stream& s) {
  if (s.digits == 1) {
    stream_digits<1>(s);
  } else if (s.digits == 2) {
    stream_digits<2>(s);
  } else {
    stream_digits<3>(s);
  }
}
