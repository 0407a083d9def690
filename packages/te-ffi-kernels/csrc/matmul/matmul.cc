#include "matmul/matmul.h"

#include <algorithm>
#include <vector>

#include "common/error.h"
#include "matmul/checks.h"
#include "matmul/floats.h"
#include "matmul/kernels.h"
#include "matmul/output.h"
#include "matmul/pack.h"
#include "matmul/slab.h"

namespace jaxtap {
namespace {

// Rows that a thread quantizes and multiplies at once, where there are as many for all threads: they
// fit its caches.
constexpr int64_t kRowsAtOnce = 128;

void check(const Matmul& a) {
  const PackedWeights& w = a.weights;
  for (const auto& [what, type] : {std::pair{"x", a.x_dtype}, std::pair{"y", a.y_dtype}}) {
    if (!is_float(type)) {
      throw invalid_argument("matmul: ", what, " must be float32, bfloat16 or float16, got ",
                             name(type));
    }
  }
  if (a.m < 0 || w.n < 0) {
    throw invalid_argument("matmul: sizes must not be negative, got m = ", a.m, ", n = ", w.n);
  }
  if (a.digits < 0 || a.digits > 3) {
    throw invalid_argument("matmul: digits must be 0, 1, 2 or 3, got ", a.digits);
  }
  if (a.x_scale != nullptr && a.digits != 1) {
    throw invalid_argument("matmul: digits must be 1 where rows have a given scale, got ",
                           a.digits);
  }
  const int64_t block = a.rotation.block;
  if (block != 0 && (block < 2 || (block & (block - 1)) != 0 || w.layout.k % block != 0)) {
    throw invalid_argument("matmul: the block of a rotation must be 0 or a power of two from 2 that "
                           "divides k = ", w.layout.k, ", got ", block);
  }
  check_size(w.layout, w.n, w.panels, w.panel_bytes);
}

// Where there is nothing to multiply.
void store_zeros(const Matmul& args) {
  const std::vector<float> zeros(static_cast<size_t>(divide_up(args.weights.n, 16) * 16));
  Epilogue f{};
  f.totals = zeros.data();
  f.rows = args.m;
  f.digits = 1;
  f.out = output_of(args, 0, 0, args.weights.n);
  generic_kernels().epilogue(f);
}

}  // namespace

const Kernels& kernels_of(Isa isa) {
  switch (isa) {
#if defined(__aarch64__)
    case Isa::kNeon:
      return neon_kernels();
    case Isa::kNeonDot:
      return neon_dot_kernels();
    case Isa::kNeonI8mm:
      return neon_i8mm_kernels();
#elif defined(__x86_64__)
    case Isa::kAvx2:
      return avx2_kernels();
    case Isa::kAvxVnni:
      return avx_vnni_kernels();
    case Isa::kAvx512:
      return avx512_kernels();
    case Isa::kAmx:
      return amx_kernels();
#endif
    default:
      return generic_kernels();
  }
}

const Kernels& kernels_of(Isa isa, int64_t digit_rows) {
  const Kernels& kernels = kernels_of(isa);
  if (digit_rows >= kernels.least_rows) return kernels;
  return kernels_of(available(Isa::kAvx512) ? Isa::kAvx512 : Isa::kGeneric);
}

int default_digits(int64_t m, const PanelLayout& layout) {
  // A few rows wait for memory anyway, if they are multiplied once, and rescaled for long groups.
  const bool waits = layout.bits == 8 || (layout.table().parts == 1 && !layout.has_column_scales());
  return m <= 4 && waits ? 3 : 2;
}

void matmul(const Matmul& args, const Parallel& parallel, Isa isa) {
  const PackedWeights& w = args.weights;
  const PanelLayout& layout = w.layout;
  check(args);
  if (args.m == 0 || w.n == 0) return;
  if (layout.k == 0) return store_zeros(args);
  if (const FloatKernels* floats = floats_suit(args, isa)) {
    return multiply_floats(args, parallel, *floats);
  }
  const int digits = args.digits == 0 ? default_digits(args.m, layout) : args.digits;
  const Kernels& kernels = kernels_of(isa, args.m * digits);
  const int64_t threads = parallel.threads();
  if (args.m >= threads * kRowsAtOnce) {
    // Rows stay in the caches of the thread that quantizes and then multiplies them.
    // Equally many tasks for each thread, in whole tiles of all instruction sets.
    const int64_t tasks = threads * divide_up(args.m, threads * kRowsAtOnce);
    const int64_t rows = 32 * divide_up(args.m, 32 * tasks);
    parallel.run(divide_up(args.m, rows), [&](int64_t i) {
      SlabMatmul matmul(args, digits, kernels);
      matmul.run(i * rows, std::min(args.m, (i + 1) * rows), Parallel());
    });
    return;
  }
  SlabMatmul matmul(args, digits, kernels);
  const int64_t fit = kSlabBytes / (layout.padded_k() * digits) / kTaskRows * kTaskRows;
  const int64_t slab = std::max(fit, kTaskRows);
  for (int64_t row = 0; row < args.m; row += slab) {
    matmul.run(row, std::min(args.m, row + slab), parallel);
  }
}

}  // namespace jaxtap
