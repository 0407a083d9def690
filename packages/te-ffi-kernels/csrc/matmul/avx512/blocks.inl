// Products of blocks of up to 6 rows and 4 panels, whose sums stay in registers, and what becomes of
// the sums.
//
// Included by kernels.cc.

// Whole sums of one plane to rows of y.
template <bool kAdds, int R, int P>
JAXTAP_INLINE void finish_block(const Finish& f, int64_t r0, int64_t p0,
                                const __m512i (&sums)[R][P]) {
  const Output out = f.out;  // a copy: nothing to read again after numbers of y are stored
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const int64_t column = 16 * (p0 + p);
    if (column >= out.columns) break;
    const __m512 scale = _mm512_loadu_ps(f.scales + (p0 + p) * f.scales_stride);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 by_row =
          _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][p]), _mm512_set1_ps(f.row_scales[r0 + r]));
      float values[16];
      _mm512_storeu_ps(values, _mm512_mul_ps(by_row, scale));
      put_16<kAdds>(out, r0 + r, column, values);
    }
  }
}

template <int R, int P>
void exact_block(const Tile& t, int64_t r0, int64_t p0) {
  __m512i acc[R][P];
  int32_t* out = t.sums + r0 * t.sums_stride + 16 * p0;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const __m512i start =
        _mm512_set1_epi32(t.first ? -t.offsets[(r0 + r) * t.offsets_stride] : 0);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      acc[r][p] = t.first ? start : _mm512_loadu_si512(out + r * t.sums_stride + 16 * p);
    }
  }
  if (R > kFewRows && t.finish != nullptr && !t.finish->out.past_caches) {
    const Output& to = t.finish->out;
    const int64_t size = to.dtype == DType::F32 ? 4 : 2;
    for (int r = 0; r < R; ++r) {
      const uint8_t* y = to.y + (r0 + r) * to.stride + 16 * p0 * size;
      for (int64_t i = 0; i < 16 * P * size; i += 64) __builtin_prefetch(y + i, 1, 3);
    }
  }
  const uint8_t* qvalues = t.qvalues + p0 * t.qvalues_stride;
  for (int64_t run = 0; run < t.runs; ++run, qvalues += 16 * t.k) {
    add_products<R, P>(t.x + r0 * t.x_stride + t.x_runs[run], t.x_stride, qvalues,
                       t.qvalues_stride, t.k, acc);
  }
  if (t.finish != nullptr) {
    return adds(t.finish->out) ? finish_block<true, R, P>(*t.finish, r0, p0, acc)
                               : finish_block<false, R, P>(*t.finish, r0, p0, acc);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      _mm512_storeu_si512(out + r * t.sums_stride + 16 * p, acc[r][p]);
    }
  }
}

template <int R, int P>
void scaled_block(const Tile& t, int64_t r0, int64_t p0) {
  __m512 totals[R][P];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) totals[r][p] = _mm512_setzero_ps();
  }
  const int32_t* offsets = t.offsets + r0 * t.offsets_stride;
  const float* x_scales = t.x_scales == nullptr ? nullptr : t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p0 * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p0 * t.qvalues_stride;
  const int8_t* x = t.x + r0 * t.x_stride;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    __m512i acc[R][P];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512i start = _mm512_set1_epi32(-offsets[r * t.offsets_stride]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = start;
    }
    add_products<R, P>(x + i, t.x_stride, qvalues, t.qvalues_stride, count, acc);
    __m512 scale[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) scale[p] = _mm512_loadu_ps(scales + p * t.scales_stride);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 x_scale =
          _mm512_set1_ps(x_scales == nullptr ? 1.0f : x_scales[r * t.offsets_stride]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][p]), x_scale);
        totals[r][p] = _mm512_add_ps(totals[r][p], _mm512_mul_ps(sum, scale[p]));
      }
    }
    ++offsets;
    if (x_scales != nullptr) ++x_scales;
    scales += t.scales_step;
    qvalues += 16 * count;
  }
  float* out = t.totals + r0 * t.sums_stride + 16 * p0;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) _mm512_storeu_ps(out + r * t.sums_stride + 16 * p, totals[r][p]);
  }
}

// R rows of x: twice as many plane rows. The totals wait in memory: the sums take the registers.
template <int R, int P, bool kWhole>
void paired_block(const Tile& t, int64_t r0, int64_t p0) {
  const int32_t* offsets = t.offsets + 2 * r0 * t.offsets_stride;
  const float* x_scales = t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p0 * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p0 * t.qvalues_stride;
  const int8_t* x = t.x + 2 * r0 * t.x_stride;
  float* totals = t.totals + r0 * t.sums_stride + 16 * p0;
  for (int r = 0; r < R; ++r) __builtin_memset(totals + r * t.sums_stride, 0, 64 * P);
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    __m512i acc[2 * R][P];
#pragma GCC unroll 6
    for (int r = 0; r < 2 * R; ++r) {
      const __m512i start = _mm512_set1_epi32(-offsets[r * t.offsets_stride]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = start;
    }
    add_products<2 * R, P>(x + i, t.x_stride, qvalues, t.qvalues_stride, count, acc);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const __m512 scale = _mm512_loadu_ps(scales + p * t.scales_stride);
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
        const __m512i low = acc[2 * r][p], high = acc[2 * r + 1][p];
        const __m512 sum =
            kWhole ? _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low))
                   : _mm512_add_ps(
                         _mm512_mul_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f)),
                         _mm512_cvtepi32_ps(low));
        const __m512 x_scale = _mm512_set1_ps(x_scales[r * t.offsets_stride]);
        const __m512 part = _mm512_mul_ps(_mm512_mul_ps(sum, x_scale), scale);
        float* total = totals + r * t.sums_stride + 16 * p;
        _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), part));
      }
    }
    ++offsets;
    ++x_scales;
    scales += t.scales_step;
    qvalues += 16 * count;
  }
}

// R wide rows. The totals wait in memory here, too, and are added to.
template <int R, int P>
void wide_block(const Tile& t, int64_t r0, int64_t p0) {
  const float* x_scales = t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p0 * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p0 * t.qvalues_stride;
  const int8_t* x = t.x + r0 * t.x_stride;
  float* totals = t.totals + r0 * t.sums_stride + 16 * p0;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    __m512i acc[R][P] = {};
    add_products<R, P, true>(x + 2 * i, t.x_stride, qvalues, t.qvalues_stride, 2 * count, acc);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const __m512 scale = _mm512_loadu_ps(scales + p * t.scales_stride);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][p]),
                                         _mm512_set1_ps(x_scales[r * t.offsets_stride]));
        float* total = totals + r * t.sums_stride + 16 * p;
        _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), _mm512_mul_ps(sum, scale)));
      }
    }
    ++x_scales;
    scales += t.scales_step;
    qvalues += 32 * count;
  }
}

using Block = void (*)(const Tile&, int64_t r0, int64_t p0);
enum class Sums { kExact, kScaled, kWide };

template <int R, int P, Sums kSums>
constexpr Block block_of() {
  return kSums == Sums::kExact    ? exact_block<R, P>
         : kSums == Sums::kScaled ? scaled_block<R, P>
                                  : wide_block<R, P>;
}

// Blocks of 1 to kRows rows, by P panels.
template <int P, Sums kSums>
constexpr Block kBlocksOf[kRows] = {block_of<1, P, kSums>(), block_of<2, P, kSums>(),
                                    block_of<3, P, kSums>(), block_of<4, P, kSums>(),
                                    block_of<5, P, kSums>(), block_of<6, P, kSums>()};

// The blocks of P panels, or of fewer for the last ones.
template <int P, Sums kSums>
const Block* blocks_of(int64_t panels) {
  if constexpr (P > 1) {
    if (panels < P) return blocks_of<P - 1, kSums>(panels);
  }
  return kBlocksOf<P, kSums>;
}

// All rows, in blocks of nearly equal size, by P panels at a time.
template <int P, Sums kSums>
void all_blocks(const Tile& t) {
  const int64_t blocks = (t.rows + kRows - 1) / kRows;
  const int64_t base = t.rows / blocks, longer = t.rows % blocks;
  for (int64_t p = 0; p < t.panels; p += P) {
    const Block* block = blocks_of<P, kSums>(t.panels - p);
    for (int64_t b = 0, r = 0; b < blocks; ++b) {
      const int64_t rows = base + (b < longer);
      block[rows - 1](t, r, p);
      r += rows;
    }
  }
}

template <bool kWhole>
void all_pairs(const Tile& t) {
  constexpr Block kBlocks[2][3] = {
      {paired_block<1, 1, kWhole>, paired_block<2, 1, kWhole>, paired_block<3, 1, kWhole>},
      {paired_block<1, 4, kWhole>, paired_block<2, 4, kWhole>, paired_block<3, 4, kWhole>}};
  const int64_t x_rows = t.rows / 2;
  for (int64_t p = 0; p < t.panels;) {
    const bool wide = t.panels - p >= 4;
    for (int64_t r = 0; r < x_rows; r += 3) {
      kBlocks[wide][x_rows - r < 3 ? x_rows - r - 1 : 2](t, r, p);
    }
    p += wide ? 4 : 1;
  }
}

void paired8(const Tile& t) { t.whole ? all_pairs<true>(t) : all_pairs<false>(t); }

void exact8(const Tile& t) { all_blocks<4, Sums::kExact>(t); }

void scaled8(const Tile& t) { all_blocks<2, Sums::kScaled>(t); }

// By ranges of K whose quantized values, of four panels, stay in the first cache.
void paired16(const Tile& all) {
  constexpr int64_t kRange = 256;
  const int64_t segments = all.segment_k < kRange ? kRange / all.segment_k : 1;
  const int64_t range = segments * all.segment_k;
  for (int64_t r = 0; r < all.rows; ++r) {
    __builtin_memset(all.totals + r * all.sums_stride, 0, static_cast<size_t>(64 * all.panels));
  }
  Tile t = all;
  for (int64_t i = 0; i < all.k; i += range) {
    t.k = all.k - i < range ? all.k - i : range;
    all_blocks<4, Sums::kWide>(t);
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
