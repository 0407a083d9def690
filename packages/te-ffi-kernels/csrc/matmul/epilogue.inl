// Work after the matmuls: rescaling sums, and adding to them, into rows of y.
//
// Included as rows.inl.

// Two branches, so that whole panels are stored by vectors and not by a loop over bytes.
template <int kSize>
JAXTAP_INLINE void copy_16(const void* from, void* to, int64_t count) {
  if (count == 16) {
    __builtin_memcpy(to, from, 16 * kSize);
  } else {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    uint8_t* out = static_cast<uint8_t*>(to);
    for (int64_t i = 0; i < count * kSize; i += kSize) __builtin_memcpy(out + i, bytes + i, kSize);
  }
}

// 16 numbers to y, of which `count` are stored.
JAXTAP_INLINE void store_16(const float* values, DType dtype, uint8_t* y, int64_t count) {
  if (dtype == DType::F32) {
    copy_16<4>(values, y, count);
    return;
  }
  uint16_t halves[16];
  if (dtype == DType::BF16) {
    for (int i = 0; i < 16; ++i) halves[i] = f32_to_bf16(values[i]);
  } else {
    for (int i = 0; i < 16; ++i) halves[i] = f32_to_f16(values[i]);
  }
  copy_16<2>(halves, y, count);
}

// Rounds 16 numbers to `dtype`, and adds `count` numbers of it to the first of them.
JAXTAP_INLINE void add_16(const uint8_t* addends, DType dtype, int64_t count, float* values) {
  float added[16] = {};
  if (dtype == DType::F32) {
    copy_16<4>(addends, added, count);
  } else {
    uint16_t halves[16] = {};
    copy_16<2>(addends, halves, count);
    if (dtype == DType::BF16) {
      for (int i = 0; i < 16; ++i) values[i] = bf16_to_f32(f32_to_bf16(values[i]));
      for (int i = 0; i < 16; ++i) added[i] = bf16_to_f32(halves[i]);
    } else {
      for (int i = 0; i < 16; ++i) values[i] = f16_to_f32(f32_to_f16(values[i]));
      for (int i = 0; i < 16; ++i) added[i] = f16_to_f32(halves[i]);
    }
  }
  for (int i = 0; i < 16; ++i) values[i] += added[i];
}

JAXTAP_INLINE bool adds(const Output& out) {
  return out.bias != nullptr || out.residual != nullptr || out.clamps;
}

#if defined(__AVX512F__)
// What `store_16` does, for 16 floats in a register.
template <bool kAdds>
JAXTAP_INLINE void store_16_floats(const Output& out, int64_t row, int64_t column, __m512 values) {
  const int64_t count = out.columns - column, at = row * out.stride + 4 * column;
  if (!kAdds && out.past_caches && count >= 16 && reinterpret_cast<uintptr_t>(out.y + at) % 64 == 0) {
    return _mm512_stream_ps(reinterpret_cast<float*>(out.y + at), values);
  }
  const auto used = static_cast<__mmask16>(count < 16 ? (1 << count) - 1 : 0xffff);
  const auto add = [&](const uint8_t* from) __attribute__((always_inline)) {
    values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(used, from));
  };
  if (kAdds && out.bias != nullptr) add(out.bias + 4 * column);
  if (kAdds && out.residual != nullptr) add(out.residual + at);
  if (kAdds && out.clamps) {  // the second operand where one is NaN
    values = _mm512_max_ps(_mm512_set1_ps(out.least), values);
    values = _mm512_min_ps(_mm512_set1_ps(out.most), values);
  }
  _mm512_mask_storeu_ps(out.y + at, used, values);
}
#endif

// 16 numbers to a row, as far as it has columns from `column` on. kAdds: there may be what is added
// to them.
template <bool kAdds>
JAXTAP_INLINE void store_16(const Output& out, int64_t row, int64_t column, float* values) {
#if defined(__AVX512F__)
  if (out.dtype == DType::F32) {
    return store_16_floats<kAdds>(out, row, column, _mm512_loadu_ps(values));
  }
#endif
  const int64_t count = out.columns - column < 16 ? out.columns - column : 16;
  const int64_t from = column * (out.dtype == DType::F32 ? 4 : 2), at = row * out.stride + from;
  if (kAdds && out.bias != nullptr) add_16(out.bias + from, out.dtype, count, values);
  if (kAdds && out.residual != nullptr) add_16(out.residual + at, out.dtype, count, values);
  if (kAdds && out.clamps) {
    for (int i = 0; i < 16; ++i) {
      values[i] = values[i] < out.least ? out.least : values[i];
      values[i] = values[i] > out.most ? out.most : values[i];
    }
  }
  store_16(values, out.dtype, out.y + at, count);
}

template <bool kAdds, bool kScaled, int kDigits, typename Sum>
inline void epilogue_rows(const Epilogue& f, const Sum* all_sums) {
  for (int64_t r = 0; r < f.rows; ++r) {
    const Sum* sums = all_sums + r * kDigits * f.stride;
    const float row_scale = f.row_scales == nullptr ? 1.0f : f.row_scales[r];
    const uint8_t* panel_scales = f.scales;
    for (int64_t c = 0; c < f.out.columns; c += 16) {
      float values[16], scales[16];
      for (int i = 0; i < 16; ++i) {
        float value = static_cast<float>(sums[c + i]);
        if (kDigits == 3) {
          value = (static_cast<float>(sums[2 * f.stride + c + i]) * 65536.0f +
                   static_cast<float>(sums[f.stride + c + i]) * 256.0f) +
                  value;
        }
        values[i] = value;
      }
      if (!kScaled) {
        for (int i = 0; i < 16; ++i) values[i] *= row_scale;
      } else {
        __builtin_memcpy(scales, panel_scales, 64);
        panel_scales += f.scales_stride;
        if (kDigits == 1) {
          for (int i = 0; i < 16; ++i) values[i] = values[i] * row_scale * scales[i];
        } else {
          for (int i = 0; i < 16; ++i) values[i] = values[i] * scales[i] * row_scale;
        }
      }
      store_16<kAdds>(f.out, r, c, values);
    }
  }
}

template <bool kScaled, int kDigits, typename Sum>
inline void epilogue_output(const Epilogue& f, const Sum* sums) {
  if (adds(f.out)) {
    epilogue_rows<true, kScaled, kDigits>(f, sums);
  } else {
    epilogue_rows<false, kScaled, kDigits>(f, sums);
  }
}

template <bool kScaled, typename Sum>
inline void epilogue_digits(const Epilogue& f, const Sum* sums) {
  if (f.digits == 1) {
    epilogue_output<kScaled, 1>(f, sums);
  } else {
    epilogue_output<kScaled, 3>(f, sums);
  }
}

inline void epilogue(const Epilogue& f) {
  if (f.sums != nullptr) {
    epilogue_digits<true>(f, f.sums);
  } else if (f.scales != nullptr) {
    epilogue_digits<true>(f, f.totals);
  } else {
    epilogue_digits<false>(f, f.totals);
  }
}
