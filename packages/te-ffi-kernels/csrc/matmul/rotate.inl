// Rotating a row of x: signs, then the Hadamard matrix of each block, by sums and differences of
// numbers that are 1, 2, 4, ... apart (the fast Walsh-Hadamard transform).
//
// Included after rows.inl by the kernels of each instruction set, and compiled with its flags:
// compilers have these vectors on every machine.

typedef float Sixteen __attribute__((vector_size(64)));

// Numbers kStep apart become their sum and their difference.
template <int kStep>
JAXTAP_INLINE void mix_within(Sixteen& x) {
  const Sixteen other = __builtin_shufflevector(
      x, x, 0 ^ kStep, 1 ^ kStep, 2 ^ kStep, 3 ^ kStep, 4 ^ kStep, 5 ^ kStep, 6 ^ kStep, 7 ^ kStep,
      8 ^ kStep, 9 ^ kStep, 10 ^ kStep, 11 ^ kStep, 12 ^ kStep, 13 ^ kStep, 14 ^ kStep, 15 ^ kStep);
  Sixteen sign;
  for (int i = 0; i < 16; ++i) sign[i] = (i & kStep) == 0 ? 1.0f : -1.0f;
  x = other + x * sign;
}

template <DType kType>
inline void rotate_numbers(const Rotate& r) {
  constexpr int64_t kSize = kType == DType::F32 ? 4 : 2;
  for (int64_t i = 0; i < r.k; i += 16) {
    float numbers[16] = {};
    if (r.k - i >= 16) {
      for (int j = 0; j < 16; ++j) {
        numbers[j] = load_float<kType>(r.x + i * kSize, j) * static_cast<float>(r.signs[i + j]);
      }
    } else {
      for (int64_t j = 0; j < r.k - i; ++j) {
        numbers[j] = load_float<kType>(r.x + i * kSize, j) * static_cast<float>(r.signs[i + j]);
      }
    }
    Sixteen x;
    __builtin_memcpy(&x, numbers, 64);
    mix_within<1>(x);
    if (r.block > 2) mix_within<2>(x);
    if (r.block > 4) mix_within<4>(x);
    if (r.block > 8) mix_within<8>(x);
    __builtin_memcpy(r.out + i, &x, 64);
  }
  // Here a block, and so the row, is a multiple of 32.
  for (int64_t step = 16; step < r.block; step *= 2) {
    for (int64_t i = 0; i < r.k; i += 2 * step) {
      for (int64_t j = i; j < i + step; j += 16) {
        Sixteen first, second;
        __builtin_memcpy(&first, r.out + j, 64);
        __builtin_memcpy(&second, r.out + j + step, 64);
        const Sixteen sum = first + second, difference = first - second;
        __builtin_memcpy(r.out + j, &sum, 64);
        __builtin_memcpy(r.out + j + step, &difference, 64);
      }
    }
  }
  for (int64_t i = 0; i < r.k; ++i) r.out[i] *= r.factor;
}

inline void rotate_row(const Rotate& r) {
  if (r.x_dtype == DType::F32) {
    rotate_numbers<DType::F32>(r);
  } else if (r.x_dtype == DType::BF16) {
    rotate_numbers<DType::BF16>(r);
  } else {
    rotate_numbers<DType::F16>(r);
  }
}
