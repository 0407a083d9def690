// Rotating a row of x: signs, then the Hadamard matrix of each block, by sums and differences of
// numbers that are 1, 2, 4, ... apart (the fast Walsh-Hadamard transform).
//
// Included after rows.inl by the kernels of each instruction set, and compiled with its flags:
// compilers have these vectors on every machine.

#if defined(__AVX512F__)
#include "matmul/avx512/rotate.inl"
#else
typedef float Sixteen __attribute__((vector_size(64)));

// Numbers kStep apart become their sum and their difference.
template <int kStep>
JAXTAP_INLINE void mix_within(Sixteen& x) {
  constexpr auto sign = [](int place) { return (place & kStep) == 0 ? 1.0f : -1.0f; };
  const Sixteen signs = {sign(0), sign(1), sign(2),  sign(3),  sign(4),  sign(5),  sign(6),  sign(7),
                         sign(8), sign(9), sign(10), sign(11), sign(12), sign(13), sign(14), sign(15)};
  const Sixteen other = __builtin_shufflevector(
      x, x, 0 ^ kStep, 1 ^ kStep, 2 ^ kStep, 3 ^ kStep, 4 ^ kStep, 5 ^ kStep, 6 ^ kStep, 7 ^ kStep,
      8 ^ kStep, 9 ^ kStep, 10 ^ kStep, 11 ^ kStep, 12 ^ kStep, 13 ^ kStep, 14 ^ kStep, 15 ^ kStep);
  x = other + x * signs;
}

template <DType kType>
inline void rotate_numbers(const Rotate& r) {
  const uint8_t* x = r.x;
  const int8_t* signs = r.signs;
  float* out = r.out;
  for (int64_t i = 0, k = r.k; i < k; ++i) {
    out[i] = load_float<kType>(x, i) * static_cast<float>(signs[i]);
  }
  for (int64_t i = r.k; i % 16 != 0; ++i) out[i] = 0.0f;
  for (int64_t i = 0; i < r.k; i += 16) {
    Sixteen numbers;
    __builtin_memcpy(&numbers, out + i, 64);
    mix_within<1>(numbers);
    if (r.block > 2) mix_within<2>(numbers);
    if (r.block > 4) mix_within<4>(numbers);
    if (r.block > 8) mix_within<8>(numbers);
    __builtin_memcpy(out + i, &numbers, 64);
  }
  // Here a block, and so the row, is a multiple of 32.
  for (int64_t step = 16; step < r.block; step *= 2) {
    for (int64_t i = 0; i < r.k; i += 2 * step) {
      for (int64_t j = i; j < i + step; j += 16) {
        Sixteen first, second;
        __builtin_memcpy(&first, out + j, 64);
        __builtin_memcpy(&second, out + j + step, 64);
        const Sixteen sum = first + second, difference = first - second;
        __builtin_memcpy(out + j, &sum, 64);
        __builtin_memcpy(out + j + step, &difference, 64);
      }
    }
  }
  const float factor = r.factor;
  for (int64_t i = 0, k = r.k; i < k; ++i) out[i] *= factor;
}

#endif

inline void rotate_row(const Rotate& r) {
  if (r.x_dtype == DType::F32) {
    rotate_numbers<DType::F32>(r);
  } else if (r.x_dtype == DType::BF16) {
    rotate_numbers<DType::BF16>(r);
  } else {
    rotate_numbers<DType::F16>(r);
  }
}
