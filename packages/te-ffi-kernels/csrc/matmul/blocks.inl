// All rows and panels of a matmul in blocks whose sums stay in registers.
//
// Included after Rows and rows_of of tile.inl, which says what these are. How a block is multiplied:
//
//   struct How {
//     using Operands;  with `rows` and `panels`
//     static constexpr int kDigits, kMostRows;  digit rows of a row, and rows of a block
//     template <int R, int P>
//     static void block(const Operands&, const Rows<R * kDigits>&, int64_t row, int64_t panel);
//   };

template <class How, int R, int P>
JAXTAP_INLINE void rows_by_panels(const typename How::Operands& t,
                                  const Rows<R * How::kDigits>& rows, int64_t r, int64_t p) {
  for (; t.panels - p >= P; p += P) How::template block<R, P>(t, rows, r, p);
  if constexpr (P > 1) {
    if (p < t.panels) rows_by_panels<How, R, P - 1>(t, rows, r, p);
  }
}

template <class How, int R, int P>
void rows_by_all(const typename How::Operands& t, int64_t r, int64_t count) {
  if constexpr (R > 1) {
    if (count < R) return rows_by_all<How, R - 1, P>(t, r, count);
  }
  rows_by_panels<How, R, P>(t, rows_of<R * How::kDigits>(t, r * How::kDigits), r, 0);
}

// All rows, in blocks of nearly equal size.
template <class How, int P>
void all_blocks(const typename How::Operands& t) {
  const int64_t rows = t.rows / How::kDigits;
  const int64_t blocks = (rows + How::kMostRows - 1) / How::kMostRows;
  for (int64_t b = 0, r = 0; b < blocks; ++b) {
    const int64_t count = rows / blocks + (b < rows % blocks);
    rows_by_all<How, How::kMostRows, P>(t, r, count);
    r += count;
  }
}
