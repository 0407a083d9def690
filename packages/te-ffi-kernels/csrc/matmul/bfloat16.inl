// Panels to bfloat16, for kernels that multiply it: AMX's and those of AVX512-BF16. Included in their
// namespace.
//
// The emulation of AMX compiles it without AVX512-BF16, with the same results.

// A scale as the one that weights are rounded with, and the rest that their sums are multiplied
// with: the power of two, so that weights are exact, unless it is infinite or NaN.
struct Parts {
  float power, rest;
};

inline Parts parts_of(float scale) {
  const uint32_t bits = float_bits(scale), exponent = bits & 0x7f800000u;
  if (exponent == 0x7f800000u) return {scale, 1.0f};
  return {bits_float(exponent), bits_float((bits & 0x807fffffu) | 0x3f800000u)};
}

#if defined(__AVX512BF16__)

// Numbers of 16 columns in two rows, as pairs.
inline void put_pairs(__m512 first, __m512 second, __m512i places, uint16_t* out) {
  const auto both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(places, both));
}

// A line of 64 bytes as rows of 16 columns, for each shift of its words.
template <int kBits>
class Line {
 public:
  // `values`: in 4 bits, what places in the table stand for.
  Line(const uint8_t* from, __m512 values) : words_(_mm512_loadu_si512(from)), values_(values) {}

  template <int kShift>
  __m512 row(__m512 scale) const {
    const __m512i shifted = kShift == 0 ? words_ : _mm512_srli_epi32(words_, kShift);
    if constexpr (kBits == 4) {  // only the low 4 bits of a place count
      return _mm512_mul_ps(_mm512_permutexvar_ps(shifted, values_), scale);
    }
    // The lowest byte as the last digits of 2 ** 23 + value + 128.
    const __m512i low = _mm512_set1_epi32(0xff), magic = _mm512_set1_epi32(0x4b000000);
    const __m512 shown = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted, low, magic, 0xea));
    return _mm512_mul_ps(_mm512_sub_ps(shown, _mm512_set1_ps(8388608.0f + 128.0f)), scale);
  }

 private:
  __m512i words_;
  __m512 values_;
};

// `count` rows, of 16 columns every `lines` lines.
template <int kBits>
inline void dequantize_rows(const float* table, const uint8_t* qvalues, int64_t count,
                            int64_t lines, const float* scales, uint16_t* out) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i places = _mm512_load_si512(order);
  const __m512 scale = _mm512_loadu_ps(scales), values = _mm512_loadu_ps(table);
  for (int64_t i = 0; i < count; i += 32 / kBits) {
    const Line<kBits> line(qvalues, values);
    put_pairs(line.template row<0>(scale), line.template row<8>(scale), places, out);
    put_pairs(line.template row<16>(scale), line.template row<24>(scale), places, out + 32);
    if constexpr (kBits == 4) {
      put_pairs(line.template row<4>(scale), line.template row<12>(scale), places, out + 64);
      put_pairs(line.template row<20>(scale), line.template row<28>(scale), places, out + 96);
    }
    qvalues += 64 * lines;
    out += 512 / kBits;
  }
}

#else

template <int kBits>
inline void dequantize_rows(const float* table, const uint8_t* qvalues, int64_t count,
                            int64_t lines, const float* scales, uint16_t* out) {
  constexpr int64_t kHeld = 32 / kBits;  // rows of a line
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* line = qvalues + i / kHeld * 64 * lines;
    for (int64_t c = 0; c < 16; ++c) {
      const int byte = line[4 * c + i % 4], place = i % kHeld < 4 ? byte & 15 : byte >> 4;
      const float value = kBits == 8 ? static_cast<float>(byte - 128) : table[place];
      out[i / 2 * 32 + 2 * c + i % 2] = f32_to_bf16(value * scales[c]);
    }
  }
}

#endif

template <int kBits>
void dequantize_panel(const Dequantize& d) {
  constexpr int64_t kWide = kBits == 8 ? 1 : 2;  // times 16 columns
  const PanelLayout& layout = *d.layout;
  const Table& table = layout.table();
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = table.values[i];
  const int64_t rows = d.steps * kStep, used = layout.padded_k() < rows ? layout.padded_k() : rows;
  const int64_t group = layout.group == 0 ? used : layout.group;
  for (int64_t begin = 0; begin < used; begin += group) {
    float scales[32];
    const uint8_t* at = d.panel + layout.scales_at(begin / group);
    if (kBits == 4) {
      load_scales(d.panel, layout, at, scales);
      for (float& scale : scales) scale *= table.factor;
    } else {
      std::memcpy(scales, at, 64);
    }
    if (layout.group == 0) {
      for (int64_t c = 0; c < 16 * kWide; ++c) {
        const Parts parts = parts_of(scales[c]);
        scales[c] = parts.power;
        d.rests[c] = parts.rest;
      }
    }
    const uint8_t* qvalues = d.panel + layout.qvalues_at(begin);
    for (int64_t i = 0; i < kWide; ++i) {
      dequantize_rows<kBits>(values, qvalues + 64 * i, group, kWide, scales + 16 * i,
                             d.out + i * d.out_stride + 16 * begin);
    }
  }
  for (int64_t i = 0; i < kWide; ++i) {
    std::memset(d.out + i * d.out_stride + 16 * used, 0, static_cast<size_t>(32 * (rows - used)));
  }
}

void dequantize(const Dequantize& d) {
  d.layout->bits == 4 ? dequantize_panel<4>(d) : dequantize_panel<8>(d);
}
