// Rows and panels of 16 bits. Included by kernels.cc.

// By ranges of K whose quantized values, of four panels, stay in the first cache.
void two_digits16(const Tile& all) {
  constexpr int64_t kRange = 256;
  const int64_t segments = all.segment_k < kRange ? kRange / all.segment_k : 1;
  const int64_t range = segments * all.segment_k;
  for (int64_t r = 0; r < all.rows; ++r) {
    __builtin_memset(all.totals + r * all.sums_stride, 0, static_cast<size_t>(64 * all.panels));
  }
  Tile t = all;
  for (int64_t i = 0; i < all.k; i += range) {
    t.k = all.k - i < range ? all.k - i : range;
    all_blocks<Scaled<Of::kInt16>, kTilePanels>(t);
    t.x += 2 * range;
    t.qvalues += 32 * range;
    t.scales += segments * t.scales_step;
    t.x_scales += segments;
  }
}

// Each 4 rows of a nibble panel to 2 registers: rows 0 and 2, and 1 and 3.
void expand_panel16(const Expand& e) {
  const Table& table = e.layout->table();
  // A place in the low byte; 0x80 in the high byte, for which there is 0.
  const __m512i mask = _mm512_set1_epi16(0x0f);
  const __m512i none = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
  const __m512i zero = _mm512_set1_epi16(static_cast<int16_t>(table.zero_point));
  const __m512i bytes[2] = {bytes_of(table, 0), bytes_of(table, 1)};
  expand_groups<256>(e, [&](int part, const uint8_t* from, uint8_t* out)
                            __attribute__((always_inline)) {
    const __m512i both = _mm512_loadu_si512(from);
    const __m512i parts[4] = {both, _mm512_srli_epi16(both, 8), _mm512_srli_epi16(both, 4),
                              _mm512_srli_epi16(both, 12)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i place = _mm512_or_si512(_mm512_and_si512(parts[i], mask), none);
      const __m512i found = _mm512_shuffle_epi8(bytes[part], place);
      _mm512_storeu_si512(out + 64 * i, _mm512_sub_epi16(found, zero));
    }
  });
}
