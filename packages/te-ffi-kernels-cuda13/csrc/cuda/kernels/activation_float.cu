// Activations, in one pass.
#include "cuda/kernels/activation_runs.h"

namespace jaxtap::cuda {
namespace {

template <class Source>
__global__ void activation_float_kernel(RunsOf<Source> args) {
  using Format = typename Source::Format;
  constexpr int kCount = kWide<Format>;
  __shared__ int scratch[kRunThreads / kWarp];
  const RunPlace place = run_place(args.runs);
  const int64_t row = place.row, col = place.run * kCount;
  int most = 0;
  if (row < args.rows) {
    float out[kCount];
    const int64_t left = args.cols - col;
    args.source.run(row, col, left, args.wide, out);
    JAXTAP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (i < left) most = larger(most, magnitude(out[i]));
    }
    store<Format>(static_cast<typename Format::Type*>(args.out) + row * args.cols + col, left,
                  args.wide, out);
  }
  add_absmax(args.absmax, most, scratch);
}

template <class Of>
void run(const Activation& given, const Quantize& outputs, Stream stream) {
  forward_source<Of>(given, outputs, [&](const auto& source) {
    const auto args = runs_args(given, outputs, source, given.cols);
    using Source = std::decay_t<decltype(source)>;
    launch(activation_float_kernel<Source>, ceil_of(args.rows * args.runs, kRunThreads),
           kRunThreads, stream, args);
  });
}

}  // namespace

void activation_float(const Activation& args, const Quantize& outputs, Stream stream) {
  by_float(args.dtype, [&](auto of) { run<decltype(of)>(args, outputs, stream); });
}

}  // namespace jaxtap::cuda
