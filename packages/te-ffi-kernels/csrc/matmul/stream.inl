// A few rows times a panel of 4 bits, which is read once, from its first byte to its last.
//
// Included by the kernels of each instruction set after finish.inl and after
//
//   // Sums of products with a part of the table's numbers over `k` rows of K, less the offsets, of
//   // kRows plane rows. Without kTable places are the numbers, plus the zero point.
//   template <bool kTable, int kRows>
//   void nibble_sums(const Table& table, int part, const int8_t* x, int64_t x_stride,
//                    const uint8_t* qvalues, int64_t k, const int32_t* offsets,
//                    int64_t offsets_stride, int32_t (*sums)[32]);

constexpr int kStreamColumns = 32;

template <bool kTable, int kRows, int kPlanes>
inline void stream_rows(const Stream& s, int64_t row) {
  float totals[kRows][kStreamColumns] = {}, loaded[kStreamColumns], scales[kStreamColumns];
  const PanelLayout& layout = *s.layout;
  const Table& table = layout.table();
  const int8_t* x = s.x + row * kPlanes * s.x_stride;
  const int32_t* offsets = s.offsets + row * kPlanes * s.offsets_stride;
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
      alignas(64) int32_t sums[kRows * kPlanes][kStreamColumns];
      const auto add = [&](int64_t k) __attribute__((always_inline)) {
        nibble_sums<kTable, kRows * kPlanes>(table, part, x + i, s.x_stride, at, k, offsets,
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
        const int32_t(*plane)[kStreamColumns] = sums + r * kPlanes;
        const float x_scale = x_scales == nullptr ? 1.0f : x_scales[r * s.x_scales_stride];
        for (int c = 0; c < kStreamColumns; ++c) {
          float value = static_cast<float>(plane[0][c]);
          if (kPlanes == 2) {
            value = paired_sum(plane[0][c], plane[1][c], s.whole);
          } else if (kPlanes == 3) {
            value = (static_cast<float>(plane[2][c]) * 65536.0f +
                     static_cast<float>(plane[1][c]) * 256.0f) +
                    value;
          }
          if (kPlanes != 3) value *= x_scale;
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
    for (int64_t c = 0; c < s.out.columns; c += 16) put_16<true>(s.out, row + r, c, totals[r] + c);
  }
}

template <bool kTable, int kPlanes>
inline void stream_table(const Stream& s) {
  int64_t row = 0;
  for (; row + 2 <= s.rows; row += 2) stream_rows<kTable, 2, kPlanes>(s, row);
  if (row < s.rows) stream_rows<kTable, 1, kPlanes>(s, row);
}

template <int kPlanes>
inline void stream_planes(const Stream& s) {
  s.layout->table_id == 0 ? stream_table<false, kPlanes>(s) : stream_table<true, kPlanes>(s);
}

inline void stream(const Stream& s) {
  if (s.planes == 1) {
    stream_planes<1>(s);
  } else if (s.planes == 2) {
    stream_planes<2>(s);
  } else {
    stream_planes<3>(s);
  }
}
