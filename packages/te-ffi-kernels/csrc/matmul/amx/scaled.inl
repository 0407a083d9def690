// Sums that are rescaled for each segment of K. Included by kernels.cc.

// Rows of K from which a segment has more to multiply than to rescale.
constexpr int64_t kLongScaled = 256;

// What the sums of a segment are rescaled with, from a block's first row and panel on.
struct Rescale {
  const int32_t* offsets;  // of digit rows; null where quantized values are signed
  int64_t offsets_stride;
  const float* x_scales;  // of rows of x
  int64_t x_scales_stride;
  const uint8_t* scales;  // of panels
  int64_t scales_stride;
};

// Adds to the totals of `rows` rows of x. `sums` are [digit rows][16 * kPanels].
template <bool kSigned, int kDigits, bool kFitsInt32, int kPanels>
JAXTAP_INLINE void rescale(const Rescale& s, const int32_t* sums, int64_t rows,
                           Floats (*totals)[kPanels]) {
  Floats scales[kPanels];
  for (int p = 0; p < kPanels; ++p) load(s.scales + p * s.scales_stride, &scales[p]);
#pragma GCC unroll 16
  for (int64_t r = 0; r < rows; ++r) {
    const auto offset_of = [&](int digit) {
      if (kSigned) return 0u;
      return static_cast<uint32_t>(s.offsets[(r * kDigits + digit) * s.offsets_stride]);
    };
    const float x_scale = s.x_scales[r * s.x_scales_stride];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      Words low;
      Floats value;
      load(sums + (r * kDigits * kPanels + p) * 16, &low);
      if (kDigits == 1) {
        value = __builtin_convertvector((Ints)(low - offset_of(0)), Floats);
      } else {
        Words high;
        load(sums + ((r * kDigits + 1) * kPanels + p) * 16, &high);
        if (kFitsInt32) {
          const uint32_t both = (offset_of(1) << 8) + offset_of(0);
          value = __builtin_convertvector((Ints)((high << 8) + low - both), Floats);
        } else {
          value = __builtin_convertvector((Ints)(high - offset_of(1)), Floats) * 256.0f +
                  __builtin_convertvector((Ints)(low - offset_of(0)), Floats);
        }
      }
      totals[r][p] += value * x_scale * scales[p];
    }
  }
}

// Of 16 digit rows, with all totals in registers, or of up to 32 without kTileRows.
template <bool kSigned, int kDigits, bool kFitsInt32, int kPanels, bool kTileRows>
void scaled_block(const Tile& t, const Shape& shape, int64_t r0, int64_t p0) {
  static constexpr float kOne = 1.0f;
  constexpr int64_t kMostRows = kTileRows ? 16 : kRows;
  const int64_t rows = (kTileRows ? 16 : shape.rows) / kDigits;
  Operands o = operands_at(t, r0, p0);
  Rescale s;
  s.offsets = kSigned ? nullptr : t.offsets + r0 * t.offsets_stride;
  s.offsets_stride = t.offsets_stride;
  const bool x_scaled = t.x_scales != nullptr;
  s.x_scales = x_scaled ? t.x_scales + r0 / kDigits * t.offsets_stride : &kOne;
  s.x_scales_stride = x_scaled ? t.offsets_stride : 0;
  s.scales = t.scales + p0 * t.scales_stride;
  s.scales_stride = t.scales_stride;

  alignas(64) int32_t sums[2][kMostRows * 16 * kPanels];
  const auto multiply_next = [&](int64_t k, int32_t* out) {
    const int64_t count = t.k - k < t.segment_k ? t.k - k : t.segment_k;
    if (kTileRows) {
      tile_zero<0>();
      if (kPanels == 2) tile_zero<1>();
      add_products<kSigned, false, kPanels == 2>(o, count, shape.chunk);
      tile_store<0>(out, 64 * kPanels);
      if (kPanels == 2) tile_store<1>(out + 16, 64 * kPanels);
    } else {
      zero_sums(shape);
      add_products<kSigned>(o, shape, count);
      store_sums(shape, out, 16 * kPanels);
    }
    o.x += count;
    o.qvalues += 16 * count;
  };

  Floats totals[kMostRows / kDigits][kPanels] = {};
  // The tiles multiply a segment while the sums of the one before are rescaled.
  multiply_next(0, sums[0]);
  int turn = 0;
  for (int64_t k = 0; k < t.k; k += t.segment_k) {
    if (k + t.segment_k < t.k) multiply_next(k + t.segment_k, sums[1 - turn]);
    rescale<kSigned, kDigits, kFitsInt32, kPanels>(s, sums[turn], rows, totals);
    if (!kSigned) ++s.offsets;
    if (x_scaled) ++s.x_scales;
    s.scales += t.scales_step;
    turn = 1 - turn;
  }
  float* out = t.totals + r0 / kDigits * t.sums_stride + 16 * p0;
#pragma GCC unroll 16
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      __builtin_memcpy(out + r * t.sums_stride + 16 * p, &totals[r][p], 64);
    }
  }
}

template <bool kSigned, int kDigits, bool kFitsInt32>
void scaled_blocks(const Tile& t) {
  // Where there is much to multiply, more rows and panels share what is loaded. Else a block has as
  // many panels as digits: 16 totals.
  const bool large = t.segment_k >= kLongScaled;
  const int64_t most_rows = large ? kRows : 16, most_panels = large ? 2 : kDigits;
  Shape shape;
  shape.chunk = chunk_of(t.segment_k);
  for (int64_t p = 0; p < t.panels; p += most_panels) {
    const bool one = most_panels == 1 || t.panels - p == 1;
    shape.panels = one ? 1 : 2;
    for (int64_t r = 0; r < t.rows; r += most_rows) {
      shape.rows = t.rows - r < most_rows ? t.rows - r : most_rows;
      configure(shape);
      const auto any = one ? scaled_block<kSigned, kDigits, kFitsInt32, 1, false>
                           : scaled_block<kSigned, kDigits, kFitsInt32, 2, false>;
      const bool in_registers = !large && shape.rows == 16 && shape.panels == kDigits;
      const auto block =
          in_registers ? scaled_block<kSigned, kDigits, kFitsInt32, kDigits, true> : any;
      block(t, shape, r, p);
    }
  }
}

template <int kDigits, bool kFitsInt32>
void scaled_blocks_of(const Tile& t) {
  t.offsets == nullptr ? scaled_blocks<true, kDigits, kFitsInt32>(t)
                       : scaled_blocks<false, kDigits, kFitsInt32>(t);
}

void scaled8(const Tile& t) { scaled_blocks_of<1, true>(t); }

void two_digits8(const Tile& t) {
  t.fits_int32 ? scaled_blocks_of<2, true>(t) : scaled_blocks_of<2, false>(t);
}
