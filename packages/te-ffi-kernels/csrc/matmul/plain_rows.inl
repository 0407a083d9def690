// Digit rows that are multiplied as they lie. Included before tile.inl, which says what these are.

template <int R>
struct Rows {
  const int8_t* x;
  int64_t stride;

  Rows from(int64_t bytes) const { return {x + bytes, stride}; }
};

template <int R>
JAXTAP_INLINE Rows<R> rows_of(const Tile& t, int64_t row) {
  return {t.x + row * t.x_stride, t.x_stride};
}

template <int R>
JAXTAP_INLINE Rows<R> run_of(const Tile& t, const Rows<R>& rows, int64_t run) {
  return rows.from(t.x_runs[run]);
}
