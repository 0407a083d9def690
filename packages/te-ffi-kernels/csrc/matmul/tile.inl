// Products of blocks of rows and panels, whose sums stay in registers, and what becomes of the sums:
// the same for all instruction sets but AMX, which has tiles.
//
// Included by the kernels of an instruction set after epilogue.inl, and after what differs:
//
//   constexpr int kTileRows, kTilePanels, kScaledPanels;
//     digit rows and panels of a block, of exact sums and of those that are rescaled: as many as
//     leave registers for the operands
//   constexpr int kFewRows;  digit rows up to which reading the weight is the limit
//   template <int kDigits> constexpr bool kTotalsStay;  whether registers hold totals beside the sums
//   constexpr bool kSignedSums;  whether add_products takes the zero point away itself, where there is
//     one: offsets are not read
//   struct Sums;    16 of int32, the columns of a panel
//   struct Floats;  16 of float32, with + and *, the latter by a float, too
//   Sums sums_of(int32_t), load_sums(const int32_t*);  void store_sums(int32_t*, const Sums&);
//   Floats load_floats(const void*), to_floats(const Sums&);  void store_floats(void*, const Floats&);
//   template <bool kFitsInt32> Floats two_digits(const Sums& low, const Sums& high);
//   template <int R> struct Rows;  R digit rows as they are multiplied; from(i): from byte i on
//   template <int R> Rows<R> rows_of(const Tile&, int64_t row);   for all panels, and
//   template <int R> Rows<R> run_of(const Tile&, const Rows<R>&, int64_t run);
//   template <bool kInt16, int R, int P>
//   void add_products(const Rows<R>&, const uint8_t* qvalues, int64_t qvalues_stride, int64_t k,
//                     Sums (&)[R][P]);
//     of `k` numbers of x; kInt16: of 16 bits, as the quantized values

// Lines of y that whole sums are about to go to.
template <int R, int P>
JAXTAP_INLINE void prefetch_output(const Output& to, int64_t r0, int64_t p0) {
  const int64_t size = to.dtype == DType::F32 ? 4 : 2;
  for (int r = 0; r < R; ++r) {
    const uint8_t* y = to.y + (r0 + r) * to.stride + 16 * p0 * size;
    for (int64_t i = 0; i < 16 * P * size; i += 64) __builtin_prefetch(y + i, 1, 3);
  }
}

// Whole sums of one digit to rows of y.
template <bool kAdds, int R, int P>
JAXTAP_INLINE void epilogue_block(const Epilogue& f, int64_t r0, int64_t p0,
                                  const Sums (&sums)[R][P]) {
  const Output out = f.out;  // a copy: nothing to read again after numbers of y are stored
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const int64_t column = 16 * (p0 + p);
    if (column >= out.columns) break;
    const Floats scale = load_floats(f.scales + (p0 + p) * f.scales_stride);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      float values[16];
      store_floats(values, to_floats(sums[r][p]) * f.row_scales[r0 + r] * scale);
      store_16<kAdds>(out, r0 + r, column, values);
    }
  }
}

template <int R, int P>
void exact_block(const Tile& t, const Rows<R>& rows, int64_t r0, int64_t p0) {
  Sums acc[R][P];
  int32_t* out = t.sums + r0 * t.sums_stride + 16 * p0;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const Sums start = sums_of(t.first && !kSignedSums ? -t.offsets[(r0 + r) * t.offsets_stride] : 0);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      acc[r][p] = t.first ? start : load_sums(out + r * t.sums_stride + 16 * p);
    }
  }
  if (R > kFewRows && t.epilogue != nullptr && !t.epilogue->out.past_caches) {
    prefetch_output<R, P>(t.epilogue->out, r0, p0);
  }
  const uint8_t* qvalues = t.qvalues + p0 * t.qvalues_stride;
  for (int64_t run = 0; run < t.runs; ++run, qvalues += 16 * t.k) {
    add_products<false>(run_of(t, rows, run), qvalues, t.qvalues_stride, t.k, acc);
  }
  if (t.epilogue != nullptr) {
    return adds(t.epilogue->out) ? epilogue_block<true>(*t.epilogue, r0, p0, acc)
                               : epilogue_block<false>(*t.epilogue, r0, p0, acc);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store_sums(out + r * t.sums_stride + 16 * p, acc[r][p]);
  }
}

// What the sums of a segment are of: one digit of each row of x; two, which are put together in int32
// or in float32; or one of 16 bits.
enum class Of { kOne, kTwoFitInt32, kTwo, kInt16 };

template <Of kOf>
constexpr int kDigitsOf = kOf == Of::kTwo || kOf == Of::kTwoFitInt32 ? 2 : 1;

// R rows of x, of which `rows` are all digit rows. Other totals are added to where they go to:
// those of rows of 16 bits, which come in ranges of K, too.
template <Of kOf, int R, int P>
void scaled_block(const Tile& t, const Rows<R * kDigitsOf<kOf>>& rows, int64_t r0, int64_t p0) {
  constexpr int kDigits = kDigitsOf<kOf>;
  constexpr bool kInt16 = kOf == Of::kInt16, kStay = !kInt16 && kTotalsStay<kDigits>;
  float* out = t.totals + r0 * t.sums_stride + 16 * p0;
  [[maybe_unused]] Floats totals[kStay ? R : 1][kStay ? P : 1] = {};
  for (int r = 0; !kStay && !kInt16 && r < R; ++r) {
    __builtin_memset(out + r * t.sums_stride, 0, 64 * P);
  }
  constexpr bool kOffsets = !kInt16 && !kSignedSums;
  const int32_t* offsets = kOffsets ? t.offsets + kDigits * r0 * t.offsets_stride : nullptr;
  const float* x_scales = t.x_scales == nullptr ? nullptr : t.x_scales + r0 * t.offsets_stride;
  const uint8_t* scales = t.scales + p0 * t.scales_stride;
  const uint8_t* qvalues = t.qvalues + p0 * t.qvalues_stride;
  for (int64_t i = 0; i < t.k; i += t.segment_k) {
    const int64_t count = t.k - i < t.segment_k ? t.k - i : t.segment_k;
    Sums acc[R * kDigits][P];
#pragma GCC unroll 6
    for (int r = 0; r < R * kDigits; ++r) {
      const Sums start = sums_of(kOffsets ? -offsets[r * t.offsets_stride] : 0);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = start;
    }
    add_products<kInt16>(rows.from(kInt16 ? 2 * i : i), qvalues, t.qvalues_stride, count, acc);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Floats scale = load_floats(scales + p * t.scales_stride);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        Floats sum;
        if constexpr (kDigits == 2) {
          sum = two_digits<kOf == Of::kTwoFitInt32>(acc[2 * r][p], acc[2 * r + 1][p]);
        } else {
          sum = to_floats(acc[r][p]);
        }
        const float x_scale = x_scales == nullptr ? 1.0f : x_scales[r * t.offsets_stride];
        const Floats part = sum * x_scale * scale;
        if constexpr (kStay) {
          totals[r][p] = totals[r][p] + part;
        } else {
          float* total = out + r * t.sums_stride + 16 * p;
          store_floats(total, load_floats(total) + part);
        }
      }
    }
    if (kOffsets) ++offsets;
    if (x_scales != nullptr) ++x_scales;
    scales += t.scales_step;
    qvalues += (kInt16 ? 32 : 16) * count;
  }
  if constexpr (kStay) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) store_floats(out + r * t.sums_stride + 16 * p, totals[r][p]);
    }
  }
}

// R rows of x by all panels: P at a time, and fewer in the end.
struct Exact {
  using Operands = Tile;
  static constexpr int kDigits = 1, kMostRows = kTileRows;

  template <int R, int P>
  static void block(const Tile& t, const Rows<R>& rows, int64_t r, int64_t p) {
    exact_block<R, P>(t, rows, r, p);
  }
};

template <Of kOf>
struct Scaled {
  using Operands = Tile;
  static constexpr int kDigits = kDigitsOf<kOf>;
  static constexpr int kMostRows = kTileRows > kDigits ? kTileRows / kDigits : 1;

  template <int R, int P>
  static void block(const Tile& t, const Rows<R * kDigits>& rows, int64_t r, int64_t p) {
    scaled_block<kOf, R, P>(t, rows, r, p);
  }
};

#include "matmul/blocks.inl"

void exact8(const Tile& t) { all_blocks<Exact, kTilePanels>(t); }

void scaled8(const Tile& t) { all_blocks<Scaled<Of::kOne>, kScaledPanels>(t); }

void two_digits8(const Tile& t) {
  t.fits_int32 ? all_blocks<Scaled<Of::kTwoFitInt32>, kTilePanels>(t)
          : all_blocks<Scaled<Of::kTwo>, kTilePanels>(t);
}
