// Activations' gradients, in one pass: both parts of a gated one at once.
#include "cuda/kernels/activation_runs.h"

namespace jaxtap::cuda {
namespace {

template <class Source, bool kGated>
__global__ void activation_gradient_float_kernel(RunsOf<Source> args) {
  using Format = typename Source::Format;
  constexpr int kCount = kWide<Format>;
  __shared__ int scratch[kRunThreads / kWarp];
  const RunPlace place = run_place(args.runs);
  const int64_t row = place.row, col = place.run * kCount;
  const int64_t n = args.cols, left = n - col;
  int most = 0;
  if (row < args.rows) {
    const Source& source = args.source;
    const int64_t line = row * n * (kGated ? 2 : 1) + col;
    float dz[kCount], a[kCount], b[kCount], da[kCount], db[kCount] = {};
    load<Format>(source.dz + row * n + col, left, args.wide, dz);
    load<Format>(source.x + line, left, args.wide, a);
    if constexpr (kGated) load<Format>(source.x + line + n, left, args.wide, b);
    by_kind(source.curve, [&](auto of) {
      JAXTAP_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const Point one = point<decltype(of)::value>(a[i], source.curve);
        da[i] = dz[i] * one.slope;
        if constexpr (kGated) {
          const Point other = gate(b[i], source.curve);
          da[i] *= other.value;
          db[i] = dz[i] * one.value * other.slope;
        }
      }
    });
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (i < left) most = larger(most, larger(magnitude(da[i]), magnitude(db[i])));
    }
    auto* to = static_cast<typename Format::Type*>(args.out) + line;
    store<Format>(to, left, args.wide, da);
    if constexpr (kGated) store<Format>(to + n, left, args.wide, db);
  }
  add_absmax(args.absmax, most, scratch);
}

template <class Source, bool kGated>
void run(const Activation& given, const Quantize& outputs, Stream stream) {
  const auto args = runs_args(given, outputs, source_of<Source>(given, outputs), given.cols);
  launch(activation_gradient_float_kernel<Source, kGated>,
         ceil_of(args.rows * args.runs, kRunThreads), kRunThreads, stream, args);
}

template <class Of>
void run_of(const Activation& given, const Quantize& outputs, Stream stream) {
  if (given.gated) return run<DerivedPair<Of>, true>(given, outputs, stream);
  return run<Derived<Of>, false>(given, outputs, stream);
}

}  // namespace

void activation_gradient_float(const Activation& args, const Quantize& outputs, Stream stream) {
  by_float(args.dtype, [&](auto of) { run_of<decltype(of)>(args, outputs, stream); });
}

}  // namespace jaxtap::cuda
